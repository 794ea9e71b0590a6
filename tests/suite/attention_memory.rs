//! Peak memory of a prefill.

use candle::{DType, Device, Result, Tensor};
use gem::{attention_d512, attention_d512_shared_kv};

use crate::attention_support::SCALE;
use crate::shared_kv_support::turning;

const CHILD: &str = "attention_memory::prefill_in_a_process_of_its_own";

/// Bytes of one (q_len x kv_len) matrix of f32, which nothing may allocate.
fn square(len: usize) -> usize {
    len * len * 4
}

fn peak_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Prints how much the peak grew over the inputs; run by the test below, since a peak is that of a whole process.
#[test]
#[ignore = "run by prefill_memory_grows_linearly_with_the_length"]
fn prefill_in_a_process_of_its_own() -> Result<()> {
    let len: usize = std::env::var("GEM_TEST_LEN")
        .ok()
        .and_then(|len| len.parse().ok())
        .unwrap_or(256);
    let t = Tensor::ones((1, 1, len, 512), DType::F32, &Device::Cpu)?;
    let keys = turning(1, 64, 0)?.keys(len)?;
    let before = peak_kib();
    match std::env::var("GEM_TEST_OP").as_deref() {
        Ok("shared_kv") => attention_d512_shared_kv(&t, &t, &keys, SCALE)?,
        _ => attention_d512(&t, &t, &t, SCALE)?,
    };
    println!("grew by {} KiB", peak_kib() - before);
    Ok(())
}

/// ml-explore/mlx#2894: a dense mask of the square of the length is what long context cannot afford.
#[test]
#[cfg(target_os = "linux")]
fn prefill_memory_grows_linearly_with_the_length() {
    assert_linear("stored");
}

/// All keys of 8,192 tokens would be 16 MiB, as much as the margin: it is a tile of them that exists at a time.
#[test]
#[cfg(target_os = "linux")]
fn prefill_memory_grows_linearly_where_keys_are_rebuilt() {
    assert_linear("shared_kv");
}

/// The same report: a mask of this length would be 16 GiB.
/// `cargo test --release --test suite -- --ignored --nocapture prefill_memory_of_65536_tokens`
#[test]
#[ignore = "takes minutes"]
#[cfg(target_os = "linux")]
fn prefill_memory_of_65536_tokens_is_that_of_the_output() {
    let grew = grew("stored", 65_536);
    println!("65,536 tokens: the peak grew by {} MiB", grew / 1024);
    assert!(grew < (128 + 16) * 1024, "{grew} KiB");
}

/// KiB by which the peak of a process grew.
#[cfg(target_os = "linux")]
fn grew(op: &str, len: usize) -> usize {
    let exe = std::env::current_exe().unwrap();
    let output = std::process::Command::new(exe)
        .args(["--exact", CHILD, "--ignored", "--nocapture"])
        .env("GEM_TEST_LEN", len.to_string())
        .env("GEM_TEST_OP", op)
        // Buffers are kept per thread, and a machine with many would pass the margin.
        .env("RAYON_NUM_THREADS", "2")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let grew = text
        .split("grew by ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let grew = grew.and_then(|kib| kib.parse().ok());
    grew.unwrap_or_else(|| panic!("{text}"))
}

#[cfg(target_os = "linux")]
fn assert_linear(op: &str) {
    let (short, long) = (grew(op, 2048), grew(op, 8192));
    // The output alone is 4 and 16 MiB; the square would be 16 and 256 MiB.
    let output = |len: usize| len * 512 * 4 / 1024;
    assert!(
        short >= output(2048) && long >= output(8192),
        "{short} {long}"
    );
    let fixed = 16 * 1024;
    assert!(long < output(8192) + fixed, "{long} KiB");
    assert!(long * 1024 < square(8192) / 4, "{long} KiB");
}
