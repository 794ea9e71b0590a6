//! Memory that outlives a call.

use std::sync::{Mutex, PoisonError};

use candle::Result;

use crate::cpu::lines::Lines;

/// Numerators of one call, with whatever an earlier call left in them.
///
/// A decode needs the same two megabytes again and again. Freed memory of this size goes back to the kernel, and the page
/// faults of getting it anew were a sixth of the time at 1,024 keys; so the last few buffers are kept.
pub(super) struct Scratch(Lines);

/// One for each call that runs at the same time, in all but odd programs.
const KEPT: usize = 4;

/// Larger ones belong to a long prefill, where the faults do not show.
const KEPT_LEN: usize = 1 << 20;

static POOL: Mutex<Vec<Lines>> = Mutex::new(Vec::new());

impl Scratch {
    pub fn take(op: &str, len: usize) -> Result<Self> {
        let kept = POOL.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match kept {
            Some(lines) if lines.len() >= len => Ok(Self(lines)),
            _ => Lines::try_zeros(op, "partial states", len).map(Self),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let lines = std::mem::replace(&mut self.0, Lines::zeros(0));
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() <= KEPT_LEN && pool.len() < KEPT {
            pool.push(lines);
        }
    }
}

impl std::ops::Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl std::ops::DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}
