//! Bounds on what foreign code allocates and how long it runs. minijinja counts the steps of a template, not the size of what a
//! step makes: a text that is doubled forty times takes forty steps and a terabyte.

use crate::guard::words;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// As of a main thread; that of others is too small for deep nesting.
const STACK: usize = 8 << 20;
/// How long a thread may be over its bytes before that is seen.
const GLANCE: Duration = Duration::from_millis(20);

struct Meter {
    /// Bytes that its thread may hold beside those it holds.
    left: AtomicUsize,
    /// Whether a bound is broken.
    stopped: AtomicBool,
}

thread_local! {
    /// Null on every thread but those of [`run`].
    static METER: Cell<*const Meter> = const { Cell::new(ptr::null()) };
}

/// What `work` gives, or which bound it broke: `bytes` held at a time or `time` passed. A panic of it is an error, too.
///
/// It runs on a thread of its own. One that breaks a bound is left asleep where it next allocates, with what it holds, since it
/// can't be ended from outside: don't let the same work try again.
pub fn run<T: Send + 'static>(
    bytes: usize,
    time: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let meter = Arc::new(Meter {
        left: AtomicUsize::new(bytes),
        stopped: AtomicBool::new(false),
    });
    let (done, result) = channel();
    let metered = meter.clone();
    let thread = thread::Builder::new().stack_size(STACK).spawn(move || {
        METER.set(Arc::as_ptr(&metered));
        let outcome = work();
        METER.set(ptr::null());
        // Who waited no longer does not want it.
        done.send(outcome).ok();
    });
    let thread = thread.map_err(|e| format!("no thread for it: {e}"))?;
    let end = Instant::now() + time;
    loop {
        match result.recv_timeout(GLANCE) {
            Ok(outcome) => {
                // It has nothing more to do, and should be gone when its caller is.
                thread.join().ok();
                return Ok(outcome);
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(match thread.join() {
                    Err(panic) => format!("it panicked: {}", words(panic.as_ref())),
                    Ok(()) => "it gave no result".into(),
                })
            }
            Err(RecvTimeoutError::Timeout) if meter.stopped.load(Ordering::Relaxed) => {
                return Err(format!("it takes more than {} MiB of memory", bytes >> 20))
            }
            Err(RecvTimeoutError::Timeout) if Instant::now() > end => {
                meter.stopped.store(true, Ordering::Relaxed);
                return Err(format!("it takes more than {time:?}"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// The meter of this thread.
fn with_meter(look: impl FnOnce(&Meter)) {
    // A thread that is being torn down has none any more.
    let meter = METER.try_with(Cell::get).unwrap_or(ptr::null());
    // SAFETY: null, or of the `Arc` that the thread holds until it has set it back to null. A panic in between drops that
    // `Arc` while unwinding, but `run` holds another until the thread is joined.
    if let Some(meter) = unsafe { meter.as_ref() } {
        look(meter);
    }
}

/// Takes `bytes` from what the thread has left; if that is less, or it was stopped, never returns.
fn take(bytes: usize) {
    with_meter(|meter| {
        let less = |left: usize| left.checked_sub(bytes);
        let order = Ordering::Relaxed;
        if meter.stopped.load(order) || meter.left.fetch_update(order, order, less).is_err() {
            METER.set(ptr::null());
            meter.stopped.store(true, order);
            loop {
                thread::park();
            }
        }
    });
}

/// Also of what another thread allocated, so a little more may be left than there was.
fn give_back(bytes: usize) {
    with_meter(|meter| {
        let more = |left: usize| Some(left.saturating_add(bytes));
        let order = Ordering::Relaxed;
        meter.left.fetch_update(order, order, more).ok();
    });
}

/// The system's, with a look at the meter.
struct Metered;

#[global_allocator]
static ALLOCATOR: Metered = Metered;

// SAFETY: every call goes to `System` as it came.
unsafe impl GlobalAlloc for Metered {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        System.alloc(layout)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        System.alloc_zeroed(layout)
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        take(size);
        give_back(layout.size());
        System.realloc(block, layout, size)
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        give_back(layout.size());
        System.dealloc(block, layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn work_within_its_bounds_gives_its_result_and_other_threads_are_not_counted() {
        let other = vec![0u8; 2 << 20];
        let work = move || {
            let inner = thread::spawn(|| vec![1u8; 2 << 20].len()).join().unwrap();
            // One after the other, more than it may hold.
            let own: usize = (0..9).map(|_| black_box(vec![0u8; 1 << 19]).len()).sum();
            (other.len(), inner, own)
        };
        assert_eq!(run(1 << 20, LONG, work), Ok((2 << 20, 2 << 20, 9 << 19)));
    }

    #[test]
    fn work_that_breaks_a_bound_is_told_which() {
        let grows = || {
            let mut block = vec![0u8; 1];
            loop {
                block.extend_from_within(..);
                black_box(&block);
            }
        };
        assert_eq!(
            run::<()>(1 << 20, LONG, grows),
            Err("it takes more than 1 MiB of memory".into())
        );
        let spins = || loop {
            black_box(vec![0u8; 1]);
        };
        assert_eq!(
            run::<()>(usize::MAX, Duration::from_millis(50), spins),
            Err("it takes more than 50ms".into())
        );
    }
}
