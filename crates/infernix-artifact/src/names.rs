//! File names of a set: what a sibling name may be, the writer's own form and the numbered form.

/// Longest file name of the common file systems, in bytes.
pub const MAX_FILE_NAME: usize = 255;

/// Why `name` cannot stand in the `files` table, or `Ok`.
pub fn check_sibling(name: &str) -> Result<(), String> {
    let reason = if name.is_empty() {
        "is empty"
    } else if name == "." || name == ".." {
        "names a folder"
    } else if name.contains(['/', '\\', '\0']) {
        "contains a separator or NUL"
    } else if name.len() > MAX_FILE_NAME {
        "is longer than 255 bytes"
    } else {
        return Ok(());
    };
    Err(format!("file name {name:.80?} {reason}; only plain names in the entry's own folder are allowed"))
}

/// Name of continuation file `index` (1-based) of the set whose entry is `entry`: `ENTRY.part-0001`.
pub fn part_name(entry: &str, index: usize) -> String {
    format!("{entry}.part-{index:04}")
}

/// Name of file `index` (1-based, the entry is 1) of `count` in the numbered form: `STEM-00001-of-00003.EXT`.
/// `plain` is the unnumbered entry name, `STEM.EXT`.
pub fn numbered_name(plain: &str, index: usize, count: usize) -> String {
    let (stem, extension) = split_extension(plain);
    format!("{stem}-{index:05}-of-{count:05}{extension}")
}

/// Splits the numbered form into (plain entry name, index, count); `None` for any other name.
pub fn parse_numbered(name: &str) -> Option<(String, usize, usize)> {
    let (stem, extension) = split_extension(name);
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (rest, index) = rest.rsplit_once('-')?;
    let number =
        |t: &str| (t.len() == 5 && t.bytes().all(|b| b.is_ascii_digit())).then(|| t.parse().ok()).flatten();
    let (index, count) = (number(index)?, number(count)?);
    (!rest.is_empty()).then(|| (format!("{rest}{extension}"), index, count))
}

/// The entry name without numbering.
pub fn plain_name(name: &str) -> String {
    parse_numbered(name).map_or_else(|| name.to_owned(), |(plain, _, _)| plain)
}

/// `("model", ".infernix")`; only the container's own extensions count as one, so that dots in model names survive.
fn split_extension(name: &str) -> (&str, &str) {
    for extension in [".infernix", ".ninfer"] {
        if let Some(stem) = name.strip_suffix(extension).filter(|stem| !stem.is_empty()) {
            return (stem, &name[stem.len()..]);
        }
    }
    (name, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn illegal_sibling_names_are_refused() {
        for bad in ["", ".", "..", "a/b", "../x", "a\\b", "a\0", "/etc/passwd", &"x".repeat(256)] {
            assert!(check_sibling(bad).is_err(), "{bad:?}");
        }
        for good in ["a", "...", "a b", "é", &"x".repeat(255)] {
            assert!(check_sibling(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn numbered_form_and_back() {
        let name = numbered_name("Qwen3.8-27B.infernix", 2, 3);
        assert_eq!(name, "Qwen3.8-27B-00002-of-00003.infernix");
        assert_eq!(parse_numbered(&name), Some(("Qwen3.8-27B.infernix".into(), 2, 3)));
        assert_eq!(parse_numbered("Qwen3.8-27B.infernix"), None);
        assert_eq!(parse_numbered("-00001-of-00002.infernix"), None);
        assert_eq!(plain_name("m-00001-of-00001"), "m");
        assert_eq!(part_name("m.infernix", 12345), "m.infernix.part-12345");
    }
}
