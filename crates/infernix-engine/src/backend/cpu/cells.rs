//! A slice that the tasks of one parallel loop fill in disjoint pieces.

use std::marker::PhantomData;
use std::ops::Range;

/// Pieces of a mutable slice for tasks that promise not to overlap.
pub(crate) struct Cells<'a, T> {
    start: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: a piece is handed to one task at a time (the promise of `Cells::piece`), and T may move between threads.
unsafe impl<T: Send> Sync for Cells<'_, T> {}

impl<'a, T> Cells<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Cells { start: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// One piece.
    ///
    /// # Safety
    /// While the piece lives, no other piece that overlaps it does.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that pieces are disjoint")]
    pub(crate) unsafe fn piece(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice, which is borrowed for 'a; disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
