//! Launches noted instead of made.

use crate::driver::Device;

/// What a round is made of, and the key of its graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tape {
    pub(crate) launches: Vec<Launch>,
    pub(crate) words: Vec<u64>,
}

impl Tape {
    /// Number of launches.
    pub fn len(&self) -> usize {
        self.launches.len()
    }

    /// Whether it holds no launch.
    pub fn is_empty(&self) -> bool {
        self.launches.is_empty()
    }

    /// Kernel and grid of launch `i`.
    pub fn kernel<'d>(&self, device: &'d Device, i: usize) -> Option<(&'d str, [u32; 3])> {
        self.launches.get(i).map(|l| (device.name_of(l.function), l.grid))
    }

    /// The same without the launches that `keep` denies.
    pub fn filtered(&self, keep: impl Fn(usize) -> bool) -> Tape {
        let launches = self.launches.iter().enumerate().filter(|(i, _)| keep(*i)).map(|(_, l)| l.clone());
        Tape { launches: launches.collect(), words: self.words.clone() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) function: usize,
    pub(crate) shared: u32,
    pub(crate) grid: [u32; 3],
    pub(crate) block: u32,
    pub(crate) pdl: bool,
    /// Its words among the tape's.
    pub(crate) first: usize,
    pub(crate) n: usize,
    pub(crate) starts: u128,
}
