//! Properties that hold for any shape, cut and order.

use candle::{DType, Device, Result, Tensor};
use gem::attention::partial::EMPTY_MAX;
use gem::attention::plan::{Partitions, ScratchBytes};
use gem::{AttentionD512, AttentionPartials};
use proptest::prelude::*;

use crate::attention_support::{bits, flat, inputs, max_error, normal, oracle, SCALE};

const DIM: usize = 6;

/// One state: empty, with anything in its numerator, or of a few keys.
fn state() -> impl Strategy<Value = (f32, f32, Vec<f32>)> {
    let values = || proptest::collection::vec(-4f32..4.0, DIM);
    prop_oneof![
        1 => Just((EMPTY_MAX, 0.0, vec![f32::NAN; DIM])),
        4 => (-80f32..80.0, 1f32..50.0, values()),
    ]
}

fn partials(states: &[(f32, f32, Vec<f32>)]) -> Result<AttentionPartials> {
    let n = states.len();
    let column = |f: fn(&(f32, f32, Vec<f32>)) -> f32| {
        Tensor::from_iter(states.iter().map(f), &Device::Cpu)?.reshape((n, 1, 1, 1))
    };
    let numerators: Vec<f32> = states.iter().flat_map(|s| s.2.clone()).collect();
    AttentionPartials::new(
        column(|s| s.0)?,
        column(|s| s.1)?,
        Tensor::from_vec(numerators, (n, 1, 1, 1, DIM), &Device::Cpu)?,
    )
}

fn close(a: &AttentionPartials, b: &AttentionPartials) -> Result<bool> {
    let out = |p: &AttentionPartials| flat(&p.finish(DType::F32)?);
    let lse = |p: &AttentionPartials| flat(&p.log_sum_exp()?);
    let near = |a: Vec<f32>, b: Vec<f32>| {
        a.iter()
            .zip(&b)
            .all(|(a, b)| a == b || (a - b).abs() <= 1e-5 * (1.0 + a.abs()))
    };
    Ok(near(out(a)?, out(b)?) && near(lse(a)?, lse(b)?))
}

fn merged(parts: &[AttentionPartials]) -> Result<AttentionPartials> {
    AttentionPartials::merge(parts)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn merge_is_associative_and_commutative_within_rounding(a in state(), b in state(), c in state()) {
        let [a, b, c] = [a, b, c].map(|s| partials(&[s]).unwrap());
        let flat = merged(&[a.clone(), b.clone(), c.clone()]).unwrap();
        let left = merged(&[merged(&[a.clone(), b.clone()]).unwrap(), c.clone()]).unwrap();
        let right = merged(&[a.clone(), merged(&[b.clone(), c.clone()]).unwrap()]).unwrap();
        let other = merged(&[c, a, b]).unwrap();
        prop_assert!(close(&flat, &left).unwrap());
        prop_assert!(close(&flat, &right).unwrap());
        prop_assert!(close(&flat, &other).unwrap());
    }

    #[test]
    fn empty_states_anywhere_do_not_change_a_bit(
        states in proptest::collection::vec(state(), 1..6),
        at in 0usize..6,
    ) {
        let mut more = states.clone();
        more.insert(at.min(states.len()), (EMPTY_MAX, 0.0, vec![f32::NAN; DIM]));
        let one = merged(&[partials(&states).unwrap()]).unwrap();
        let two = merged(&[partials(&more).unwrap()]).unwrap();
        prop_assert_eq!(bits(one.numerator()).unwrap(), bits(two.numerator()).unwrap());
        prop_assert_eq!(bits(one.max()).unwrap(), bits(two.max()).unwrap());
        prop_assert_eq!(bits(one.denominator()).unwrap(), bits(two.denominator()).unwrap());
    }

    #[test]
    fn partitions_cover_every_key_once(len in 1usize..5000, count in 1usize..300) {
        let partitions = Partitions::new(len, count).unwrap();
        let covered: Vec<usize> = (0..count).flat_map(|p| partitions.range(p)).collect();
        prop_assert_eq!(covered, (0..len).collect::<Vec<_>>());
    }

    #[test]
    fn scratch_is_three_buffers_or_an_error(rows in 1u64.., partitions in 1u64.., dim in 1u64..) {
        let exact = rows as u128 * partitions as u128 * 4 * (2 + dim as u128);
        match ScratchBytes::new(rows, partitions, dim) {
            Ok(bytes) => prop_assert_eq!(bytes.total as u128, exact),
            Err(_) => prop_assert!(exact > u64::MAX as u128),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_shape_equals_the_oracle_whatever_the_partitions(
        batch in 1usize..3,
        kv_heads in 1usize..4,
        group in 1usize..10,
        q_len in 1usize..12,
        more in 0usize..160,
        partitions in 1usize..40,
        seed in 0u64..1000,
    ) {
        let kv_len = q_len + more;
        let [q, k, v] = inputs(seed, (batch, group * kv_heads, kv_heads, q_len, kv_len)).unwrap();
        let want = oracle(&q, &k, &v, SCALE as f64, true).unwrap();
        for op in [AttentionD512::new(SCALE), AttentionD512::new(SCALE).partitions(partitions)] {
            let got = op.forward(&q, &k, &v).unwrap();
            let error = max_error(&got, &want).unwrap();
            prop_assert!(error < 2e-6, "{:e}", error);
        }
    }

    #[test]
    fn what_lies_beyond_a_view_never_reaches_the_output(
        len in 1usize..100,
        before in 0usize..9,
        after in 0usize..70,
        q_len in 1usize..5,
    ) {
        let q_len = q_len.min(len);
        let q = normal(1, (1, 8, q_len, 512), DType::BF16).unwrap();
        let kv = normal(2, (1, 2, len, 512), DType::BF16).unwrap();
        let nan = |n: usize| {
            Tensor::full(f32::NAN, (1, 2, n, 512), &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap()
        };
        let cache = Tensor::cat(&[&nan(before), &kv, &nan(after)], 2).unwrap();
        let view = cache.narrow(2, before, len).unwrap();
        let op = AttentionD512::new(SCALE);
        let want = op.forward(&q, &kv, &kv).unwrap();
        let got = op.forward(&q, &view, &view).unwrap();
        prop_assert_eq!(bits(&got).unwrap(), bits(&want).unwrap());
    }
}
