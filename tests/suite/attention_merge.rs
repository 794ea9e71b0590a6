//! Partial states: the algebra of the merge, and what it refuses.

use candle::{DType, Device, Result, Tensor};
use gem::attention::partial::EMPTY_MAX;
use gem::{attention_d512, AttentionD512, AttentionPartials};

use crate::attention_support::{bits, flat, inputs, max_error, normal, oracle, refusal, SCALE};

/// States of one row each: `(max, denominator, numerator)`, all in one partition.
fn states(rows: &[(f32, f32, Vec<f32>)]) -> Result<AttentionPartials> {
    let (n, dim) = (rows.len(), rows[0].2.len());
    let max: Vec<f32> = rows.iter().map(|r| r.0).collect();
    let denominator: Vec<f32> = rows.iter().map(|r| r.1).collect();
    let numerator: Vec<f32> = rows.iter().flat_map(|r| r.2.clone()).collect();
    let cpu = &Device::Cpu;
    AttentionPartials::new(
        Tensor::from_vec(max, (1, 1, 1, n), cpu)?,
        Tensor::from_vec(denominator, (1, 1, 1, n), cpu)?,
        Tensor::from_vec(numerator, (1, 1, 1, n, dim), cpu)?,
    )
}

fn empty(dim: usize) -> (f32, f32, Vec<f32>) {
    (EMPTY_MAX, 0.0, vec![f32::NAN; dim])
}

/// The state of scores and values, in f64, rounded.
fn state_of(scores: &[f64], values: &[Vec<f64>], dim: usize) -> (f32, f32, Vec<f32>) {
    if scores.is_empty() {
        return empty(dim);
    }
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let column = |d| {
        weights
            .iter()
            .zip(values)
            .map(|(w, v)| w * v[d])
            .sum::<f64>() as f32
    };
    (
        max as f32,
        weights.iter().sum::<f64>() as f32,
        (0..dim).map(column).collect(),
    )
}

#[test]
fn thirteen_tokens_of_seventeen_dims_merge_to_the_same_in_any_cut() -> Result<()> {
    let scores: Vec<f64> = (0..13).map(|t| ((t * 7 % 13) as f64 - 6.0) * 0.5).collect();
    let values: Vec<Vec<f64>> = (0..13)
        .map(|t| {
            (0..17)
                .map(|d| ((t * 5 + d * 3) % 11) as f64 / 4.0 - 1.0)
                .collect()
        })
        .collect();
    let (max, denominator, numerator) = state_of(&scores, &values, 17);
    let lse = max as f64 + (denominator as f64).ln();
    let want: Vec<f64> = numerator
        .iter()
        .map(|n| *n as f64 / denominator as f64)
        .collect();
    for cut in [1usize, 2, 3, 4, 7, 16] {
        let size = 13usize.div_ceil(cut);
        let parts: Vec<AttentionPartials> = (0..cut)
            .map(|p| {
                let range = (p * size).min(13)..((p + 1) * size).min(13);
                states(&[state_of(&scores[range.clone()], &values[range], 17)])
            })
            .collect::<Result<_>>()?;
        let merged = AttentionPartials::merge(&parts)?;
        let error = max_error(&merged.finish(DType::F32)?, &want)?;
        assert!(error < 3e-7, "{cut}: {error:e}");
        let error = max_error(&merged.log_sum_exp()?, &[lse])?;
        assert!(error < 1e-6, "{cut}: {error:e}");
    }
    Ok(())
}

#[test]
fn merge_with_an_empty_partition_is_the_identity_bit_for_bit() -> Result<()> {
    let row = (
        1.25f32,
        3.5f32,
        vec![-0.0, 1e-30, f32::MIN_POSITIVE / 4.0, 7.0],
    );
    let alone = states(std::slice::from_ref(&row))?;
    let nothing = states(&[empty(4)])?;
    for parts in [
        vec![alone.clone(), nothing.clone()],
        vec![nothing.clone(), alone.clone()],
        vec![nothing.clone(), alone.clone(), nothing.clone()],
    ] {
        let merged = AttentionPartials::merge(&parts)?;
        for (got, want) in [
            (merged.max(), alone.max()),
            (merged.denominator(), alone.denominator()),
            (merged.numerator(), alone.numerator()),
        ] {
            assert_eq!(bits(got)?, bits(want)?);
        }
    }
    Ok(())
}

/// vllm-project/vllm#39148: -inf minus -inf where no part saw a key.
#[test]
fn rows_that_no_part_saw_are_zero_and_nothing_leaks_out_of_an_empty_state() -> Result<()> {
    let full = |x: f32| vec![x; 512];
    let a = |lse: f32, out: f32| (lse, 1.0, full(out));
    let ln3 = 3f32.ln();
    let parts = [
        states(&[a(0.0, 1.0), empty(512), empty(512), empty(512)])?,
        states(&[a(ln3, 5.0), empty(512), a(-2.0, 0.3), a(4.0, -6.0)])?,
        states(&[empty(512), empty(512), empty(512), empty(512)])?,
    ];
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let parts: Vec<_> = order.iter().map(|i| parts[*i].clone()).collect();
        let merged = AttentionPartials::merge(&parts)?;
        let out = merged.finish(DType::F32)?;
        let row = |r: usize| flat(&out.narrow(2, r, 1)?);
        assert!(row(0)?.iter().all(|x| (x - 4.0).abs() < 1e-6));
        assert!(row(1)?.iter().all(|x| x.to_bits() == 0));
        assert_eq!(row(2)?, full(0.3));
        assert_eq!(row(3)?, full(-6.0));
        let lse = flat(&merged.log_sum_exp()?)?;
        assert!((lse[0] - 1.386_294).abs() < 1e-6);
        assert_eq!(lse[1], f32::NEG_INFINITY);
        assert_eq!(lse[2..], [-2.0, 4.0]);
    }
    Ok(())
}

/// sgl-project/sglang#40903: a log-sum-exp in base 2 merged as if natural.
#[test]
fn log_sum_exp_is_natural_and_prefix_and_suffix_merge_to_the_whole() -> Result<()> {
    let ones = |len, x: f32| Tensor::full(x, (1, 1, len, 512), &Device::Cpu);
    let q = Tensor::ones((1, 2, 1, 512), DType::F32, &Device::Cpu)?;
    let op = AttentionD512::new(SCALE);
    let keys = |len| ones(len, 0.0);
    let first = op.partials(&q, &keys(8)?, &ones(8, 1.0)?)?;
    let second = op.partials(&q, &keys(24)?, &ones(24, 5.0)?)?;
    for (part, want) in [(&first, 2.0794f32), (&second, 3.1781)] {
        assert!(flat(&part.log_sum_exp()?)?
            .iter()
            .all(|x| (x - want).abs() < 1e-4));
    }
    let merged = AttentionPartials::merge(&[first, second])?.finish(DType::F32)?;
    assert!(flat(&merged)?.iter().all(|x| (x - 4.0).abs() < 1e-6));

    let [q, k, v] = inputs(3, (2, 16, 2, 4, 3072 + 64))?;
    let cut = |op: AttentionD512, first, len| {
        op.partials(&q, &k.narrow(2, first, len)?, &v.narrow(2, first, len)?)
    };
    // All four query rows come after the prefix, so they see the whole of it.
    let prefix = cut(op.causal(false), 0, 3072)?;
    let suffix = cut(op, 3072, 64)?;
    let merged = AttentionPartials::merge(&[prefix, suffix])?.finish(DType::F32)?;
    let error = max_error(&merged, &oracle(&q, &k, &v, SCALE as f64, true)?)?;
    assert!(error < 1e-6, "{error:e}");
    Ok(())
}

#[test]
fn finished_partials_are_the_bits_of_forward() -> Result<()> {
    let [q, k, v] = inputs(9, (2, 8, 2, 3, 500))?;
    for partitions in [1, 3, 32] {
        let op = AttentionD512::new(SCALE).partitions(partitions);
        let partials = op.partials(&q, &k, &v)?;
        assert_eq!(partials.numerator().dims(), [partitions, 2, 8, 3, 512]);
        let want = bits(&op.forward(&q, &k, &v)?)?;
        assert_eq!(bits(&partials.finish(DType::F32)?)?, want);
        let merged = AttentionPartials::merge(&[partials])?;
        assert_eq!(merged.max().dims(), [1, 2, 8, 3]);
        assert_eq!(bits(&merged.finish(DType::F32)?)?, want);
    }
    Ok(())
}

#[test]
fn trailing_empty_partitions_are_empty_states() -> Result<()> {
    let [q, k, v] = inputs(9, (1, 8, 1, 1, 3))?;
    let partials = AttentionD512::new(SCALE)
        .partitions(7)
        .partials(&q, &k, &v)?;
    let max = flat(&partials.max().narrow(0, 3, 4)?)?;
    let denominator = flat(&partials.denominator().narrow(0, 3, 4)?)?;
    assert!(max.iter().all(|x| *x == EMPTY_MAX) && denominator.iter().all(|x| *x == 0.0));
    Ok(())
}

#[test]
fn states_that_cannot_occur_are_errors() -> Result<()> {
    let good = states(&[(0.5, 2.0, vec![1.0, 2.0])])?;
    let refused = |row: (f32, f32, Vec<f32>)| -> Result<String> {
        let bad = states(&[row])?;
        let merge = refusal(AttentionPartials::merge(&[good.clone(), bad.clone()]));
        assert_eq!(merge, refusal(bad.finish(DType::F32)));
        Ok(merge)
    };
    let values = || vec![1.0, 2.0];
    insta::assert_snapshot!(refused((0.5, -1.0, values()))?, @"attention_partials: a state has denominator -1, want 0 or a finite sum of exponentials that is no subnormal");
    insta::assert_snapshot!(refused((0.5, f32::NAN, values()))?, @"attention_partials: a state has denominator NaN, want 0 or a finite sum of exponentials that is no subnormal");
    insta::assert_snapshot!(refused((0.5, f32::INFINITY, values()))?, @"attention_partials: a state has denominator inf, want 0 or a finite sum of exponentials that is no subnormal");
    insta::assert_snapshot!(refused((f32::NAN, 1.0, values()))?, @"attention_partials: a state has maximum NaN, want a finite one (empty states use -3.4028235e38)");
    insta::assert_snapshot!(refused((f32::NEG_INFINITY, 0.0, values()))?, @"attention_partials: a state has maximum -inf, want a finite one (empty states use -3.4028235e38)");
    insta::assert_snapshot!(refused((0.5, 0.0, values()))?, @"attention_partials: a state has maximum 0.5 but denominator 0, want at least 1 once a key was seen");
    insta::assert_snapshot!(refused((EMPTY_MAX, 1.0, values()))?, @"attention_partials: a state has denominator 1 but the maximum of an empty state");
    insta::assert_snapshot!(refused((0.5, 1.0, vec![1.0, f32::NAN]))?, @"attention_partials: a numerator of a state with denominator 1 is not finite");
    Ok(())
}

#[test]
fn a_nan_that_was_attended_to_fails_closed_in_finish() -> Result<()> {
    let q = normal(1, (1, 2, 1, 512), DType::F32)?;
    let kv = Tensor::full(f32::NAN, (1, 1, 3, 512), &Device::Cpu)?;
    let partials = AttentionD512::new(SCALE).partials(&q, &kv, &kv)?;
    assert!(partials.finish(DType::F32).is_err());
    assert!(partials.log_sum_exp().is_err());
    Ok(())
}

#[test]
fn partials_that_do_not_fit_together_are_refused() -> Result<()> {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let new = |max: &[usize], numerator: &[usize]| -> Result<AttentionPartials> {
        AttentionPartials::new(zeros(max)?, zeros(&[1, 1, 2, 1])?, zeros(numerator)?)
    };
    insta::assert_snapshot!(refusal(new(&[1, 1, 2, 1], &[1, 2, 1, 7])), @"attention_partials: numerator has shape [1, 2, 1, 7], want a non-empty (partitions, batch, heads, q_len, dim)");
    insta::assert_snapshot!(refusal(new(&[1, 1, 3, 1], &[1, 1, 2, 1, 7])), @"attention_partials: max has shape [1, 1, 3, 1], want [1, 1, 2, 1] to go with a numerator of dim 7");
    let half = AttentionPartials::new(
        zeros(&[1, 1, 2, 1])?.to_dtype(DType::F16)?,
        zeros(&[1, 1, 2, 1])?,
        zeros(&[1, 1, 2, 1, 7])?,
    );
    insta::assert_snapshot!(refusal(half), @"attention_partials: max has dtype F16, want f32");
    insta::assert_snapshot!(refusal(AttentionPartials::merge(&[])), @"attention_partials: got no parts to merge, want at least one");
    let a = states(&[(0.0, 1.0, vec![1.0; 3])])?;
    let b = states(&[(0.0, 1.0, vec![1.0; 4])])?;
    insta::assert_snapshot!(refusal(AttentionPartials::merge(&[a.clone(), b])), @"attention_partials: part 1 has rows of shape [1, 1, 1, 4], part 0 has [1, 1, 1, 3], want the same");
    insta::assert_snapshot!(refusal(a.finish(DType::F64)), @"attention_partials: cannot finish as F64, want f32, f16 or bf16");
    Ok(())
}

#[test]
fn training_through_the_op_or_its_parts_fails_loudly() -> Result<()> {
    let [q, k, v] = inputs(2, (1, 2, 1, 1, 4))?;
    let q = candle::Var::from_tensor(&q)?;
    let q = q.as_tensor();
    let op = AttentionD512::new(SCALE);
    let partials = op.partials(q, &k, &v)?;
    let merged = AttentionPartials::merge(std::slice::from_ref(&partials))?;
    for out in [
        attention_d512(q, &k, &v, SCALE)?,
        partials.denominator().clone(),
        merged.numerator().clone(),
        merged.finish(DType::F32)?,
        merged.log_sum_exp()?,
    ] {
        let error = refusal(out.sum_all()?.backward());
        assert!(error.contains("backward is not supported"), "{error}");
    }
    Ok(())
}
