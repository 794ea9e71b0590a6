//! Scores and states at the edge of f32, and buffers that outlive a call.

use candle::{DType, Device, Result, Tensor};
use gem::attention::partial::EMPTY_MAX;
use gem::attention::CpuKernel;
use gem::{AttentionD512, AttentionPartials};

use crate::attention_support::{bits, flat, inputs, refusal, SCALE};

const KERNELS: [CpuKernel; 3] = [CpuKernel::Portable, CpuKernel::Avx2, CpuKernel::Avx512];

/// 600 keys of which those in `range` score -inf, the others 0; the value of each key is 1, or 7 where it scores -inf.
fn hidden(range: std::ops::Range<usize>) -> Result<[Tensor; 3]> {
    let rows = |inside: f32, outside: f32| {
        let row = |t| [if range.contains(&t) { inside } else { outside }; 512];
        Tensor::from_vec(
            (0..600).flat_map(row).collect(),
            (1, 1, 600, 512),
            &Device::Cpu,
        )
    };
    let q = Tensor::ones((1, 8, 1, 512), DType::F32, &Device::Cpu)?;
    Ok([q, rows(f32::NEG_INFINITY, 0.0)?, rows(7.0, 1.0)?])
}

/// Softmax gives such keys no weight, wherever the partitions are cut.
#[test]
fn keys_that_score_minus_infinity_do_not_count() -> Result<()> {
    for range in [0..300, 300..600, 0..1, 599..600, 100..500, 1..600] {
        let [q, k, v] = hidden(range.clone())?;
        for partitions in [1, 2, 3, 32, 600] {
            let op = AttentionD512::new(1.0).partitions(partitions);
            for kernel in KERNELS {
                let Ok(out) = op.cpu_kernel(kernel).forward(&q, &k, &v) else {
                    continue;
                };
                let what = format!("{range:?}, {partitions} partitions, {kernel:?}");
                assert!(
                    flat(&out)?.iter().all(|&x| (x - 1.0).abs() < 1e-6),
                    "{what}: {}",
                    flat(&out)?[0]
                );
            }
            let finished = op.partials(&q, &k, &v)?.finish(DType::F32)?;
            assert!(flat(&finished)?.iter().all(|&x| (x - 1.0).abs() < 1e-6));
        }
    }
    let [q, k, v] = hidden(0..600)?;
    for partitions in [1, 3] {
        let out = AttentionD512::new(1.0)
            .partitions(partitions)
            .forward(&q, &k, &v)?;
        assert!(
            flat(&out)?.iter().all(|x| x.is_nan()),
            "no key counts: softmax has no value"
        );
        // The states of other keys may still come, so theirs are those of a row that saw none.
        let states = AttentionD512::new(1.0)
            .partitions(partitions)
            .partials(&q, &k, &v)?;
        assert!(flat(states.max())?.iter().all(|&x| x == EMPTY_MAX));
        assert!(flat(&states.finish(DType::F32)?)?.iter().all(|&x| x == 0.0));
        let sums = flat(&states.log_sum_exp()?)?;
        assert!(sums.iter().all(|&x| x == f32::NEG_INFINITY));
    }
    Ok(())
}

/// Threads keep their buffers between calls.
#[test]
fn nothing_of_one_call_reaches_the_next() -> Result<()> {
    for (partitions, q_len) in [(1, 1), (4, 1), (3, 90)] {
        let qkv = inputs(5, (1, 8, 1, q_len, 700))?;
        let op = AttentionD512::new(SCALE).partitions(partitions);
        let run = || -> Result<Vec<u32>> { bits(&op.forward(&qkv[0], &qkv[1], &qkv[2])?) };
        let empties = || -> Result<Vec<f32>> {
            let few = qkv.each_ref().map(|t| t.narrow(2, 0, 1));
            let [q, k, v] = few;
            flat(
                AttentionD512::new(SCALE)
                    .partitions(5)
                    .partials(&q?, &k?, &v?)?
                    .numerator(),
            )
        };
        let (clean, clean_empties) = (run()?, empties()?);
        let nan = qkv[2].affine(f64::NAN, 0.0)?;
        for _ in 0..3 {
            op.forward(&qkv[0], &qkv[1], &nan)?;
            op.partials(&qkv[0], &qkv[1], &nan)?;
        }
        assert_eq!(run()?, clean, "{partitions} partitions, {q_len} rows");
        assert_eq!(empties()?, clean_empties);
        // Four of the five partitions of one key are empty.
        assert!(clean_empties[8 * 512..].iter().all(|&x| x == 0.0));
    }
    Ok(())
}

#[test]
fn partitions_without_memory_for_their_states_are_an_error() -> Result<()> {
    let row = Tensor::zeros((1, 1, 1, 512), DType::F32, &Device::Cpu)?;
    let many = row.broadcast_as((1, 64, 4096, 512))?;
    let op = AttentionD512::new(1.0);
    insta::assert_snapshot!(refusal(op.partitions(65_535).partials(&many, &row.broadcast_as((1, 1, 4096, 512))?, &row.broadcast_as((1, 1, 4096, 512))?)), @"attention_d512: no memory for 17179607040 partial states, which would take 35321272074240 bytes");
    let keys = row.broadcast_as((1, 1, 40_000, 512))?;
    insta::assert_snapshot!(refusal(op.partitions(1 << 20).forward(&many, &keys, &keys)), @"attention_d512: got 1048576 partitions, whose states of 64 rows take 5263360000 bytes, want at most 4294967296");
    Ok(())
}

fn states(rows: &[(f32, f32, f32)]) -> Result<AttentionPartials> {
    let column = |pick: fn(&(f32, f32, f32)) -> f32| rows.iter().map(pick).collect::<Vec<_>>();
    let n = rows.len();
    AttentionPartials::new(
        Tensor::from_vec(column(|r| r.0), (n, 1, 1, 1), &Device::Cpu)?,
        Tensor::from_vec(column(|r| r.1), (n, 1, 1, 1), &Device::Cpu)?,
        Tensor::from_vec(column(|r| r.2), (n, 1, 1, 1, 1), &Device::Cpu)?,
    )
}

#[test]
fn states_that_leave_f32_are_refused_by_every_way_out() -> Result<()> {
    let tiny = states(&[(0.0, 1e-39, 1.0)])?;
    let sums = states(&[(0.0, 3e38, 1.0), (0.0, 3e38, 1.0)])?;
    let numerators = states(&[(0.0, 1.0, 3e38), (0.0, 1.0, 3e38)])?;
    for (part, log_sum_exp_too) in [(&tiny, true), (&sums, true), (&numerators, false)] {
        assert_ne!(refusal(part.finish(DType::F32)), "not refused");
        assert_ne!(
            refusal(AttentionPartials::merge(std::slice::from_ref(part))),
            "not refused"
        );
        assert_eq!(
            refusal(part.log_sum_exp()) != "not refused",
            log_sum_exp_too
        );
    }
    // An empty state stays legal, and so does a sum below 1, as states that were merged elsewhere can have.
    let fine = states(&[(EMPTY_MAX, 0.0, f32::NAN), (2.0, 0.25, 0.5)])?;
    assert_eq!(flat(&fine.finish(DType::F32)?)?, [2.0]);
    Ok(())
}
