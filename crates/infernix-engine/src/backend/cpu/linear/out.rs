//! Where products go.

use super::super::num::bf16_of;
use std::marker::PhantomData;

/// A matrix `[columns, stride]` that threads fill, each its own rows of the weight: element (column, offset + row).
#[derive(Clone, Copy)]
pub struct Out<'a> {
    wide: *mut f32,
    narrow: *mut u16,
    columns: usize,
    stride: usize,
    offset: usize,
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: threads write disjoint elements (each row of the weight belongs to one task), and nobody reads before the
// parallel loop is over; the borrow in `life` keeps others away.
unsafe impl Sync for Out<'_> {}
// SAFETY: as above.
unsafe impl Send for Out<'_> {}

impl<'a> Out<'a> {
    /// FP32 products.
    pub fn f32(y: &'a mut [f32], columns: usize, stride: usize) -> Self {
        assert!(y.len() >= columns * stride, "{} values for {columns} x {stride}", y.len());
        Out {
            wide: y.as_mut_ptr(),
            narrow: std::ptr::null_mut(),
            columns,
            stride,
            offset: 0,
            life: PhantomData,
        }
    }

    /// Products rounded to BF16.
    pub fn bf16(y: &'a mut [u16], columns: usize, stride: usize) -> Self {
        assert!(y.len() >= columns * stride, "{} values for {columns} x {stride}", y.len());
        Out {
            wide: std::ptr::null_mut(),
            narrow: y.as_mut_ptr(),
            columns,
            stride,
            offset: 0,
            life: PhantomData,
        }
    }

    /// The same, rows shifted by `rows` (a later part of a stacked weight).
    pub fn shifted(self, rows: usize) -> Self {
        Out { offset: self.offset + rows, ..self }
    }

    /// Stores the products of consecutive rows.
    #[inline(always)]
    pub(crate) fn put_rows(&self, column: usize, row: usize, y: &[f32]) {
        let at = self.offset + row;
        assert!(column < self.columns && at + y.len() <= self.stride);
        let i = column * self.stride + at;
        for (n, y) in y.iter().enumerate() {
            if self.narrow.is_null() {
                // SAFETY: as `put`, for each of the rows.
                unsafe { self.wide.add(i + n).write(*y) }
            } else {
                // SAFETY: as above.
                unsafe { self.narrow.add(i + n).write(bf16_of(*y)) }
            }
        }
    }

    /// Stores one product.
    #[inline(always)]
    pub(crate) fn put(&self, column: usize, row: usize, y: f32) {
        let at = self.offset + row;
        assert!(column < self.columns && at < self.stride);
        let i = column * self.stride + at;
        if self.narrow.is_null() {
            // SAFETY: i < columns * stride, checked against the slice on creation; the element is this task's alone.
            unsafe { self.wide.add(i).write(y) }
        } else {
            // SAFETY: as above.
            unsafe { self.narrow.add(i).write(bf16_of(y)) }
        }
    }
}
