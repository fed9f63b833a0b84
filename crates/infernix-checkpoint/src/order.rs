//! Numeric order of file names: `model-2.safetensors` before `model-10.safetensors`.

use std::cmp::Ordering;

/// Compares names with runs of digits taken as numbers, whatever their width; equal numbers of different
/// width fall back to the plain order, so that the order is total.
pub fn natural_cmp(a: &str, b: &str) -> Ordering {
    let (mut x, mut y) = (a.as_bytes(), b.as_bytes());
    loop {
        match (x.first(), y.first()) {
            (None, None) => return a.cmp(b),
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some(p), Some(q)) if p.is_ascii_digit() && q.is_ascii_digit() => {
                let (m, rest_x) = number(x);
                let (n, rest_y) = number(y);
                // Without leading zeros a longer run of digits is a larger number.
                let order = m.len().cmp(&n.len()).then_with(|| m.cmp(n));
                if order != Ordering::Equal {
                    return order;
                }
                (x, y) = (rest_x, rest_y);
            }
            (Some(p), Some(q)) => {
                if p != q {
                    return p.cmp(q);
                }
                (x, y) = (&x[1..], &y[1..]);
            }
        }
    }
}

/// Splits off the leading run of digits, without its leading zeros.
fn number(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|c| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    let zeros = digits.iter().position(|&c| c != b'0').unwrap_or(digits.len());
    (&digits[zeros..], rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_sort_by_number_not_by_text() {
        let mut names = [
            "model-10.safetensors",
            "model-fp8.safetensors",
            "model-2.safetensors",
            "a",
            "model-1.safetensors",
        ];
        names.sort_by(|a, b| natural_cmp(a, b));
        assert_eq!(
            names,
            [
                "a",
                "model-1.safetensors",
                "model-2.safetensors",
                "model-10.safetensors",
                "model-fp8.safetensors"
            ]
        );
    }

    #[test]
    fn order_is_total_and_survives_huge_numbers() {
        assert_eq!(natural_cmp("x01", "x1"), Ordering::Less);
        assert_eq!(natural_cmp("x1", "x01"), Ordering::Greater);
        assert_eq!(natural_cmp("x1", "x1"), Ordering::Equal);
        let big = "9".repeat(100);
        assert_eq!(natural_cmp(&big, "10"), Ordering::Greater);
        assert_eq!(natural_cmp("", "a"), Ordering::Less);
        assert_eq!(natural_cmp("0", "00"), Ordering::Less);
    }
}
