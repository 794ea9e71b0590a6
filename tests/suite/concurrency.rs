//! Many threads in one op at once.

use crate::attention_support::normal;
use crate::common::example;
use crate::qsa_support::{bytes, results, state_at, Rows};
use candle::{DType, Device, Result, Tensor};
use gem::attention::{RotaryKeys, RotaryTables};
use gem::{
    attention_d512, attention_d512_shared_kv, AttentionD512, AttentionPartials, FusedProjection,
};

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

/// The bytes of what every op makes of the same inputs.
fn every_op() -> Result<impl Fn() -> Result<Vec<Vec<u8>>> + Sync> {
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
    let (rows, state) = (Rows::fused(8, 40)?, state_at(3)?);
    Ok(move || {
        let states = AttentionD512::new(0.05)
            .partitions(7)
            .partials(&q, &k, &v)?;
        let merged = AttentionPartials::merge(&[states.clone(), states.clone()])?;
        let mut all = vec![
            bytes(&attention_d512(&q, &k, &v, 0.05)?),
            bytes(&attention_d512_shared_kv(&q, &v, &keys, 0.05)?),
            bytes(projection.forward(&xs)?.packed()),
            bytes(merged.numerator()),
            bytes(&merged.finish(DType::F32)?),
            bytes(&states.log_sum_exp()?),
        ];
        all.extend(results(&rows.prep(&state)?).iter().map(|(_, t)| bytes(t)));
        Ok(all)
    })
}

#[test]
fn every_op_gives_the_bits_that_it_gives_alone() -> Result<()> {
    let all = every_op()?;
    let alone = all()?;
    on_all_threads(|thread| {
        for round in 0..50 {
            assert!(all()? == alone, "thread {thread}, round {round}");
        }
        Ok(())
    })
}

#[test]
fn every_op_gives_the_same_bits_on_one_two_and_seven_threads() -> Result<()> {
    let all = every_op()?;
    let alone = all()?;
    for threads in [1, 2, 7] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .map_err(candle::Error::wrap)?;
        assert!(pool.install(&all)? == alone, "{threads} threads");
    }
    Ok(())
}

/// At lengths of many partitions: what is cut by the length must not be cut by the threads.
#[test]
fn long_caches_give_the_same_bits_on_one_two_and_seven_threads() -> Result<()> {
    const LONGEST: usize = 20_000;
    let cache = normal(1, (1, 1, LONGEST, 512), DType::BF16)?;
    let tables = RotaryTables::new(&[1.0, 0.01], LONGEST, &Device::Cpu)?;
    let keys = RotaryKeys::new(&normal(2, 512, DType::F32)?, &tables)?;
    let pools = [1, 2, 7].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        (threads, pool.expect("a pool"))
    });
    for kv_len in [8_192, LONGEST] {
        let (k, v) = (
            cache.narrow(2, 0, kv_len)?,
            cache.narrow(2, LONGEST - kv_len, kv_len)?,
        );
        for q_len in [1, 9] {
            let q = normal(3, (1, 8, q_len, 512), DType::F32)?;
            let all = || -> Result<[Vec<u8>; 4]> {
                let states = AttentionD512::new(0.05).partials(&q, &k, &v)?;
                Ok([
                    bytes(&attention_d512(&q, &k, &v, 0.05)?),
                    bytes(&attention_d512_shared_kv(&q, &v, &keys, 0.05)?),
                    bytes(states.numerator()),
                    bytes(&states.finish(DType::F32)?),
                ])
            };
            let [one, two, seven] = pools.each_ref().map(|(_, pool)| pool.install(all));
            let one = one?;
            for (threads, other) in [(2, two?), (7, seven?)] {
                assert!(
                    other == one,
                    "{threads} threads, {q_len} rows over {kv_len} keys"
                );
            }
        }
    }
    Ok(())
}

/// The whole program, candle's own products among it.
#[test]
fn the_program_says_the_same_on_one_two_and_seven_threads() {
    let text = |threads: &str, path: &str| {
        let story = ["--cpu", "-q", "--prompt", "Once upon a time", "-n", "40"];
        let output = std::process::Command::new(example("gemma4"))
            .args(story)
            .args(["--attention", path])
            .env("RAYON_NUM_THREADS", threads)
            .output()
            .unwrap();
        assert!(output.status.success());
        assert!(!output.stdout.is_empty());
        output.stdout
    };
    for path in ["fused", "fused-kv", "reference"] {
        let [one, two, seven] = ["1", "2", "7"].map(|threads| text(threads, path));
        assert_eq!([&two, &seven], [&one; 2], "{path}");
    }
}
