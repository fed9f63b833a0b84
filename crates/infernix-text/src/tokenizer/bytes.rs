//! The byte-to-character map of byte-level BPE.
//!
//! Every byte has a printable stand-in so that vocabularies can be written as JSON strings: printable
//! Latin-1 bytes stand for themselves, the other 68 are numbered from U+0100 upwards in byte order.

/// Whether the byte is its own stand-in.
const fn printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// Stand-in of each byte.
const STAND_INS: [char; 256] = {
    let mut table = ['\0'; 256];
    let mut next = 256u32;
    let mut byte = 0usize;
    while byte < 256 {
        table[byte] = if printable(byte as u8) {
            byte as u8 as char
        } else {
            next += 1;
            match char::from_u32(next - 1) {
                Some(c) => c,
                None => '\0',
            }
        };
        byte += 1;
    }
    table
};

/// The stand-in character of a byte.
pub(crate) fn stand_in(byte: u8) -> char {
    STAND_INS[usize::from(byte)]
}

/// The byte a stand-in character stands for, `None` for any other character.
pub(crate) fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    if let Ok(byte) = u8::try_from(code) {
        return printable(byte).then_some(byte);
    }
    // The non-printable bytes in order: 0..=32, 127..=160, 173.
    match code.checked_sub(256)? {
        n @ 0..=32 => Some(n as u8),
        n @ 33..=66 => Some((n - 33 + 127) as u8),
        67 => Some(173),
        _ => None,
    }
}

/// Bytes of a vocabulary entry; an entry with a character outside the map stands for its own UTF-8,
/// as the reference decoder treats it.
pub(crate) fn token_bytes(token: &str) -> Vec<u8> {
    token.chars().map(byte_of).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_stand_in_and_comes_back() {
        for byte in 0..=255u8 {
            assert_eq!(byte_of(stand_in(byte)), Some(byte), "byte {byte}");
        }
        assert_eq!(stand_in(b' '), 'Ġ');
        assert_eq!(stand_in(b'\n'), 'Ċ');
        assert_eq!(byte_of('字'), None);
        assert_eq!(byte_of(' '), None);
    }
}
