//! Many threads in one op at once.

use crate::attention_support::{bits, normal};
use candle::{DType, Device, Result, Tensor};
use gem::attention::{RotaryKeys, RotaryTables};
use gem::{attention_d512, attention_d512_shared_kv, FusedProjection};

const THREADS: usize = 8;

/// Runs `round(thread)` on all threads at once.
fn on_all_threads(round: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let round = &round;
                scope.spawn(move || round(thread))
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("a thread panicked"))
    })
}

/// huggingface/candle#3595: what one thread reads back is what it computed, whatever the others have under way.
#[test]
fn a_result_that_is_read_at_once_is_the_thread_s_own() -> Result<()> {
    on_all_threads(|thread| {
        let q = normal(thread as u64, (1, 8, 1, 512), DType::F32)?;
        let k = normal(100 + thread as u64, (1, 1, 40, 512), DType::F32)?;
        for round in 0..200 {
            // Exact in f32, so that any average of it is.
            let value = (thread * 1000 + round) as f32;
            let v = Tensor::full(value, (1, 1, 40, 512), &Device::Cpu)?;
            let out = attention_d512(&q, &k, &v, 0.0)?;
            let last = out.narrow(1, 7, 1)?.narrow(3, 500, 12)?;
            let whole = out.flatten_all()?.to_vec1::<f32>()?;
            let last = last.flatten_all()?.to_vec1::<f32>()?;
            assert!(
                whole.iter().chain(&last).all(|&x| x == value),
                "thread {thread}, round {round}"
            );
        }
        Ok(())
    })
}

#[test]
fn every_op_gives_the_bits_that_it_gives_alone() -> Result<()> {
    let q = normal(1, (1, 8, 3, 512), DType::F32)?;
    let k = normal(2, (1, 2, 300, 512), DType::BF16)?;
    let v = normal(3, (1, 2, 300, 512), DType::BF16)?;
    let tables = RotaryTables::new(&[1.0, 0.5, 0.25], 300, &Device::Cpu)?;
    let keys = RotaryKeys::new(&normal(4, 512, DType::F32)?, &tables)?;
    let xs = normal(5, (5, 64), DType::F32)?;
    let (a, b) = (
        normal(6, (40, 64), DType::BF16)?,
        normal(7, (24, 64), DType::BF16)?,
    );
    let projection = FusedProjection::pack(&[("a", &a), ("b", &b)])?;
    let all = || -> Result<[Vec<u32>; 3]> {
        Ok([
            bits(&attention_d512(&q, &k, &v, 0.05)?)?,
            bits(&attention_d512_shared_kv(&q, &v, &keys, 0.05)?)?,
            bits(projection.forward(&xs)?.packed())?,
        ])
    };
    let alone = all()?;
    on_all_threads(|thread| {
        for round in 0..50 {
            assert!(all()? == alone, "thread {thread}, round {round}");
        }
        Ok(())
    })
}
