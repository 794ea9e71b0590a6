//! For targets that reach crates whose panics the program makes errors of.

use std::collections::HashSet;
use std::sync::Mutex;

/// Lets the program catch panics, which the fuzzer else takes for crashes, and tells each place of one once. A panic that the
/// program does not catch ends the run as before.
pub fn let_be_caught() {
    let told = Mutex::new(HashSet::new());
    std::panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(ToString::to_string);
        if told.lock().is_ok_and(|mut told| told.insert(place)) {
            eprintln!("{panic}");
        }
    }));
}
