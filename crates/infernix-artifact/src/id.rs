//! Digests (BLAKE3-256) and identifiers (16 bytes with UUID version 8 bits), printed as lower-case hex.

use std::fmt;
use std::str::FromStr;

macro_rules! hex_type {
    ($(#[$doc:meta])* $name:ident, $n:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub [u8; $n]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = String;

            /// Exactly the printed form: upper-case digits are refused, so that one text has one value.
            fn from_str(text: &str) -> Result<Self, String> {
                let bytes = text.as_bytes();
                if bytes.len() != 2 * $n {
                    return Err(format!("expected {} hex digits, found {} bytes", 2 * $n, bytes.len()));
                }
                let digit = |b: u8| match b {
                    b'0'..=b'9' => Ok(b - b'0'),
                    b'a'..=b'f' => Ok(b - b'a' + 10),
                    _ => Err(format!("{:?} is no lower-case hex digit", char::from(b))),
                };
                let mut out = [0; $n];
                for (byte, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *byte = digit(pair[0])? << 4 | digit(pair[1])?;
                }
                Ok(Self(out))
            }
        }
    };
}

hex_type!(
    /// A BLAKE3-256 digest.
    Digest,
    32
);
hex_type!(
    /// Identity of an artifact or of a volume: the raw bytes of a UUID.
    ArtifactId,
    16
);

impl Digest {
    /// Length of the printed form.
    pub const HEX: usize = 64;

    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl ArtifactId {
    /// The first 16 bytes of a digest with the version (8) and variant bits of RFC 9562 set.
    pub fn from_digest(digest: &Digest) -> Self {
        let mut id = [0; 16];
        id.copy_from_slice(&digest.0[..16]);
        id[6] = id[6] & 0x0f | 0x80;
        id[8] = id[8] & 0x3f | 0x80;
        Self(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_round_trips_and_refuses_upper_case() {
        let digest = Digest::of(b"x");
        assert_eq!(digest.to_string().parse::<Digest>(), Ok(digest));
        assert!(digest.to_string().to_uppercase().parse::<Digest>().is_err());
        assert!("00".parse::<ArtifactId>().is_err());
    }

    #[test]
    fn ids_carry_uuid_version_8() {
        let id = ArtifactId::from_digest(&Digest([0xff; 32]));
        assert_eq!(id.to_string(), "ffffffffffff8fffbfffffffffffffff");
    }
}
