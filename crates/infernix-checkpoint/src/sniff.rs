//! Recognises what often stands in place of a file: a git-lfs pointer, a web page, an error message.

use std::path::Path;

use crate::CheckpointError;

/// Bytes of a file's start that are enough to recognise it. A git-lfs pointer is about 130 bytes.
pub(crate) const SNIFF_BYTES: usize = 512;

/// What `start` (the first bytes of a file) is, if it is a well-known impostor: a description and a way out.
pub(crate) fn impostor(start: &[u8]) -> Option<(String, &'static str)> {
    const FETCH: &str = "fetch the file itself from the repository";
    if start.starts_with(b"version https://git-lfs.github.com/")
        || start.starts_with(b"version https://hawser.")
    {
        let text = String::from_utf8_lossy(start);
        let field =
            |key: &str| text.lines().find_map(|l| l.strip_prefix(key)).unwrap_or("?").trim().to_owned();
        let found = format!("a git-lfs pointer (to {}, {} bytes)", field("oid "), field("size "));
        return Some((found, "run `git lfs pull` in the repository, or fetch the file itself"));
    }
    let text = start.trim_ascii_start();
    let head: Vec<u8> = text.iter().take(16).map(u8::to_ascii_lowercase).collect();
    if head.starts_with(b"<!doctype html") || head.starts_with(b"<html") || head.starts_with(b"<head") {
        return Some((
            "an HTML page".to_owned(),
            "the download was answered by a web page (a login, a viewer or an error); fetch the raw file",
        ));
    }
    if head.starts_with(b"<?xml") {
        return Some(("an XML document (an error of the storage server)".to_owned(), FETCH));
    }
    if head.starts_with(b"pk\x03\x04") {
        return Some((
            "a zip archive (a PyTorch pickle?)".to_owned(),
            "only safetensors files are read; pickles can run code",
        ));
    }
    if start.starts_with(b"\x1f\x8b") {
        return Some(("a gzip archive".to_owned(), "unpack it, or fetch the file itself"));
    }
    if head.starts_with(b"gguf") {
        return Some(("a GGUF file".to_owned(), "give it a name that ends in .gguf"));
    }
    None
}

/// What `start` is if it is text where a binary length is due: a message of the storage server, a pointer of another
/// store. The first eight bytes of a safetensors file are a length below 2^27, so half of them are zero.
pub(crate) fn text_for_binary(start: &[u8]) -> Option<(String, &'static str)> {
    let printable = |b: &u8| b.is_ascii_graphic() || b.is_ascii_whitespace();
    if start.len() < 8 || !start[..8].iter().all(printable) {
        return None;
    }
    let shown: String = String::from_utf8_lossy(&start[..start.len().min(60)]).chars().take(40).collect();
    let what = if shown.to_ascii_lowercase().contains("xet") { "a xet pointer" } else { "text" };
    Some((format!("{what} that begins {shown:?}"), "fetch the file itself from the repository"))
}

/// An error if `start` is an impostor of `expected`.
pub(crate) fn refuse_impostor(
    path: &Path,
    expected: &'static str,
    start: &[u8],
) -> Result<(), CheckpointError> {
    let binary = expected == "a safetensors file";
    match impostor(start).or_else(|| text_for_binary(start).filter(|_| binary)) {
        Some((found, advice)) => {
            Err(CheckpointError::Impostor { path: path.to_path_buf(), expected, found, advice })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lfs_pointer_is_named_with_its_digest_and_size() {
        let (found, advice) = impostor(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n",
        )
        .expect("recognised");
        assert!(found.contains("sha256:4d7a2146") && found.contains("12345 bytes"), "{found}");
        assert!(advice.contains("git lfs pull"));
    }

    #[test]
    fn pages_and_archives_are_named() {
        assert!(impostor(b"\n  <!DOCTYPE HTML><html>").expect("html").0.contains("HTML"));
        assert!(impostor(b"<html lang=en>").expect("html").0.contains("HTML"));
        assert!(impostor(b"<?xml version=\"1.0\"?><Error>").expect("xml").0.contains("XML"));
        assert!(impostor(b"PK\x03\x04").expect("zip").0.contains("zip"));
        assert!(impostor(b"GGUF\x03\0\0\0").expect("gguf").0.contains("GGUF"));
    }

    #[test]
    fn text_where_a_length_is_due_is_shown() {
        let (found, _) = text_for_binary(b"{\"error\":\"Repository not found\"}").expect("text");
        assert!(found.contains("Repository not found"), "{found}");
        assert!(
            text_for_binary(b"# xet version 0\nfilesize = 12\n").expect("text").0.contains("a xet pointer")
        );
        assert_eq!(text_for_binary(b"\x40\0\0\0\0\0\0\0{\"a\":"), None);
        assert!(impostor(b"\x1f\x8b\x08").expect("gzip").0.contains("gzip"));
    }

    #[test]
    fn real_starts_are_left_alone() {
        assert_eq!(impostor(b"\x40\0\0\0\0\0\0\0{\"a\":"), None);
        assert_eq!(impostor(b"{\"metadata\": {}}"), None);
        assert_eq!(impostor(b""), None);
    }
}
