//! The pool of KV pages: a free list with reference counts.

use crate::error::EngineError;

/// Hands out page numbers. A page may have several holders (shared prefixes); it is free when the last lets go.
#[derive(Debug)]
pub struct KvPool {
    holders: Vec<u32>,
    free: Vec<u32>,
}

impl KvPool {
    /// A pool of pages 0..pages, all free; low numbers go first.
    pub fn new(pages: usize) -> Self {
        KvPool { holders: vec![0; pages], free: (0..pages as u32).rev().collect() }
    }

    /// Pages nobody holds.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Takes a free page.
    pub fn take(&mut self) -> Result<u32, EngineError> {
        let page = self.free.pop().ok_or(EngineError::OutOfPages { pages: self.holders.len() })?;
        self.holders[page as usize] = 1;
        Ok(page)
    }

    /// One more holder of a held page.
    pub fn retain(&mut self, page: u32) {
        debug_assert!(self.holders[page as usize] > 0);
        self.holders[page as usize] += 1;
    }

    /// Whether a page has more than one holder and must be copied before it is written.
    pub fn is_shared(&self, page: u32) -> bool {
        self.holders[page as usize] > 1
    }

    /// One holder less.
    pub fn release(&mut self, page: u32) {
        let n = &mut self.holders[page as usize];
        debug_assert!(*n > 0);
        *n -= 1;
        if *n == 0 {
            self.free.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_return_when_the_last_holder_lets_go() {
        let mut p = KvPool::new(2);
        let a = p.take().unwrap();
        p.retain(a);
        let _b = p.take().unwrap();
        assert!(matches!(p.take(), Err(EngineError::OutOfPages { pages: 2 })));
        p.release(a);
        assert!(!p.is_shared(a));
        assert_eq!(p.available(), 0);
        p.release(a);
        assert_eq!(p.take().unwrap(), a);
    }
}
