//! Device memory between guard zones.

use std::sync::atomic::{AtomicBool, Ordering};

use half::{bf16, f16};

const PAGE: usize = 4096;
/// Unmapped on both sides, so wide that a stray index still meets it and is put down to the right buffer.
const GUARD: usize = 4 << 20;
/// What nobody wrote reads as NaN in every floating-point type.
const POISON: u8 = 0xff;

/// A scalar that a [`Buffer`] can hold: any bits are a value of it.
pub trait Element: Copy + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($scalar:ty),*) => {
        $(impl Element for $scalar {}
        impl sealed::Sealed for $scalar {})*
    };
}
elements!(f32, f16, bf16, u8, i8, u16, i16, u32, i32, u64, i64);

/// Device memory. It knows which of its bytes hold a value.
pub struct Buffer {
    base: *mut u8,
    total: usize,
    data: *mut u8,
    bytes: usize,
    /// A bit for each byte; `None`: all of them hold a value.
    initialised: Option<Vec<u64>>,
    /// Whether the machine lets nobody write: then even a fast kernel cannot.
    protected: AtomicBool,
}

// SAFETY: a Buffer owns its mapping; access goes through & and &mut as for a Vec.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `bytes` of device memory that nobody wrote. A checked kernel that reads them fails; a fast one reads NaN.
    ///
    /// # Panics
    ///
    /// When the machine has no address space left.
    pub fn uninitialised(bytes: usize) -> Buffer {
        let body = bytes.next_multiple_of(16);
        let pages = body.next_multiple_of(PAGE).max(PAGE);
        let total = pages + 2 * GUARD;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh anonymous mapping; `pages` in its middle become accessible, and `data` lies in them.
        let (base, data) = unsafe {
            let base = libc::mmap(std::ptr::null_mut(), total, libc::PROT_NONE, flags, -1, 0);
            assert!(
                base != libc::MAP_FAILED,
                "msl: no address space for {total} bytes"
            );
            let base = base.cast::<u8>();
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let status = libc::mprotect(base.add(GUARD).cast(), pages, access);
            assert!(status == 0, "msl: no memory for {pages} bytes");
            std::ptr::write_bytes(base.add(GUARD), POISON, pages);
            // The end meets the guard zone, when it is a multiple of 16.
            (base, base.add(GUARD + pages - body))
        };
        Buffer {
            base,
            total,
            data,
            bytes,
            initialised: Some(vec![0; bytes / 64 + 1]),
            protected: AtomicBool::new(false),
        }
    }

    /// A copy of `values`.
    ///
    /// # Panics
    ///
    /// As [`Buffer::uninitialised`].
    pub fn new<T: Element>(values: &[T]) -> Buffer {
        let mut buffer = Buffer::uninitialised(std::mem::size_of_val(values));
        // SAFETY: the buffer has the size of `values`, and was made just now.
        unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr().cast(), buffer.data, buffer.bytes);
        }
        buffer.initialised = None;
        buffer
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The elements; those that nobody wrote are all ones, NaN as a float. Bytes behind the last whole element are
    /// left out.
    pub fn to_vec<T: Element>(&self) -> Vec<T> {
        let count = self.bytes / std::mem::size_of::<T>();
        // SAFETY: the data is aligned to 16, `count` elements lie in it, and any bits are an Element.
        unsafe { std::slice::from_raw_parts(self.data.cast::<T>(), count) }.to_vec()
    }

    /// How many bytes nobody wrote. Only checked kernels tell; a fast one counts as writing all of its outputs.
    pub fn unwritten_bytes(&self) -> usize {
        let Some(bits) = &self.initialised else {
            return 0;
        };
        (0..self.bytes)
            .filter(|i| bits[i / 64] >> (i % 64) & 1 == 0)
            .count()
    }

    pub(crate) fn data(&self) -> *mut u8 {
        self.data
    }

    /// Lets nobody write to the memory, until the next use that may.
    pub(crate) fn protect(&self) {
        if !self.protected.swap(true, Ordering::SeqCst) {
            self.set_access(libc::PROT_READ);
        }
    }

    pub(crate) fn unprotect(&mut self) {
        if self.protected.swap(false, Ordering::SeqCst) {
            self.set_access(libc::PROT_READ | libc::PROT_WRITE);
        }
    }

    fn set_access(&self, access: i32) {
        let pages = self.total - 2 * GUARD;
        // SAFETY: the accessible part of this buffer's mapping, which stays readable.
        let status = unsafe { libc::mprotect(self.base.add(GUARD).cast(), pages, access) };
        assert!(
            status == 0,
            "msl: cannot change the access to {pages} bytes"
        );
    }

    /// The bits of the bytes that hold a value; null: all do.
    pub(crate) fn initialised(&self) -> *const u64 {
        self.initialised
            .as_ref()
            .map_or(std::ptr::null(), |bits| bits.as_ptr())
    }

    pub(crate) fn initialised_mut(&mut self) -> *mut u64 {
        let bits = self.initialised.as_mut();
        bits.map_or(std::ptr::null_mut(), |bits| bits.as_mut_ptr())
    }

    /// Forgets the bytes from `offset` on.
    pub(crate) fn poison(&mut self, offset: usize) {
        self.unprotect();
        let words = self.bytes / 64 + 1;
        let bits = self
            .initialised
            .get_or_insert_with(|| vec![u64::MAX; words]);
        // The rest of the word that `offset` lies in, and the words behind it.
        let word = offset / 64;
        bits[word] &= (1 << (offset % 64)) - 1;
        bits[word + 1..].fill(0);
        // SAFETY: offset <= bytes is checked where a buffer is bound.
        unsafe { std::ptr::write_bytes(self.data.add(offset), POISON, self.bytes - offset) };
    }

    pub(crate) fn mark_all_written(&mut self) {
        self.initialised = None;
    }

    pub(crate) fn save(&self) -> (Vec<u8>, Option<Vec<u64>>) {
        (self.to_vec(), self.initialised.clone())
    }

    pub(crate) fn restore(&mut self, (data, initialised): &(Vec<u8>, Option<Vec<u64>>)) {
        self.unprotect();
        // SAFETY: `data` is what `save` copied out of this buffer.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.data, self.bytes) };
        self.initialised = initialised.clone();
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping that `uninitialised` made, and nothing refers to it any more.
        unsafe { libc::munmap(self.base.cast(), self.total) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgetting_the_tail_leaves_the_head() {
        let mut buffer = Buffer::new(&(0..70u8).collect::<Vec<_>>());
        assert_eq!(buffer.unwritten_bytes(), 0);
        buffer.poison(3);
        assert_eq!(buffer.unwritten_bytes(), 67);
        assert_eq!(buffer.to_vec::<u8>()[..4], [0, 1, 2, 0xff]);
    }
}
