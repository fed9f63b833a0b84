//! Signatures of thinking blocks: opaque to clients, which give them back unchanged.
//!
//! A visible block's signature only has to be there. Where the text is left out, the signature carries it, so that the
//! next prompt is the same as if it had been shown. Signatures of other servers carry nothing for us.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

const VISIBLE: &str = "ix1.";
const OMITTED: &str = "ix1o.";

/// The signature of a shown block.
pub(crate) fn visible(reasoning: &str) -> String {
    let hash = blake3::hash(reasoning.as_bytes());
    format!("{VISIBLE}{}", STANDARD.encode(&hash.as_bytes()[..18]))
}

/// The signature that carries a block's text.
pub(crate) fn omitted(reasoning: &str) -> String {
    format!("{OMITTED}{}", STANDARD.encode(reasoning))
}

/// The text that a signature of ours carries.
pub(crate) fn reasoning(signature: &str) -> Option<String> {
    let bytes = STANDARD.decode(signature.strip_prefix(OMITTED)?).ok()?;
    String::from_utf8(bytes).ok()
}
