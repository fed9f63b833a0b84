//! Hash constants of the n-gram table, derived on their own here so that they check the converter's.

/// Seed that releases leave out of their config.
const SEED: u64 = 1234;
/// 2 n-gram orders (bigram, trigram) of 8 heads.
const HEADS: usize = 16;
/// Rows are padded to a multiple of this.
const DIVISOR: u64 = 128;

/// The three int64 buffers of a checkpoint, and the padded number of rows.
pub(crate) struct Constants {
    pub(crate) multipliers: Vec<u64>,
    pub(crate) sizes: Vec<u64>,
    pub(crate) offsets: Vec<u64>,
    pub(crate) rows: u64,
}

pub(crate) fn constants(base: u64, vocab: u64) -> Constants {
    let half = i64::MAX as u64 / vocab / 2;
    let multipliers = (0..3u64)
        .map(|i| 2 * (splitmix(SEED.wrapping_add(super::fill::GAMMA.wrapping_mul(i + 1))) % half) + 1)
        .collect();
    let sizes: Vec<u64> = (base..).filter(|&n| prime(n)).take(HEADS).collect();
    let offsets = sizes
        .iter()
        .scan(0, |at, n| {
            let offset = *at;
            *at += n;
            Some(offset)
        })
        .collect();
    let rows = sizes.iter().sum::<u64>().next_multiple_of(DIVISOR);
    Constants { multipliers, sizes, offsets, rows }
}

/// splitmix64's output for a state: it adds gamma once more before mixing.
fn splitmix(state: u64) -> u64 {
    super::fill::mix(state.wrapping_add(super::fill::GAMMA))
}

fn prime(n: u64) -> bool {
    n >= 2 && (2..).take_while(|d| d * d <= n).all(|d| n % d != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_release() {
        let c = constants(20_000_000, 248_320);
        assert_eq!(c.multipliers, [23703573157769, 20109073645365, 8052911324071]);
        assert_eq!((c.sizes[0], c.sizes[15]), (20000003, 20000171));
        assert_eq!(c.rows, 320_001_536);
        assert_eq!(c.offsets[1], 20000003);
    }
}
