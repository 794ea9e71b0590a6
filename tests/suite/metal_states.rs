//! Partial states on Metal: the kernels of attention_states.metal on the plans that Metal would be given.

use crate::attention_support::{bits, flat, inputs, max_error, normal, refusal, SCALE};
use crate::metal_support::{run, Call};
use candle::{DType, Device, IndexOp, Result, Tensor};
use gem::attention::gpu::states::{self, StateSizes};
use gem::attention::gpu::{plan_states, Route, Tiling};
use gem::attention::partial::EMPTY_MAX;
use gem::attention::plan::Partitions;
use gem::attention::AttentionGeometry;
use gem::backend::plan::Plan;
use gem::backend::plan::Target;
use gem::{AttentionD512, AttentionPartials};
use msl::Mode;

/// What the kernels make of states, on the plan that a Metal tensor of the same layout would get.
struct OnMetal<'a>(&'a AttentionPartials);

impl OnMetal<'_> {
    fn sizes(&self) -> StateSizes {
        let dims = self.0.numerator().dims();
        StateSizes {
            rows: dims[1..4].iter().product(),
            partitions: dims[0],
            dim: dims[4],
        }
    }

    fn run(&self, plan: impl Fn(StateSizes, [u64; 3]) -> Result<Plan>) -> Tensor {
        let inputs = [self.0.max(), self.0.denominator(), self.0.numerator()];
        let starts = inputs.map(|t| t.layout().start_offset() as u64);
        let plan = plan(self.sizes(), starts).unwrap();
        run(&plan, &inputs, Mode::Checked).unwrap().0.remove(0)
    }

    fn merge(&self) -> AttentionPartials {
        let [_, batch, heads, q_len, dim] = self.dims();
        unpacked(
            &self.run(|sizes, starts| states::merge(Target::Metal, sizes, starts)),
            [1, batch, heads, q_len, dim],
        )
    }

    fn finish(&self, dtype: DType) -> Tensor {
        let out = self.run(|sizes, starts| states::finish(Target::Metal, sizes, starts, dtype));
        out.reshape(&self.dims()[1..]).unwrap()
    }

    fn log_sum_exp(&self) -> Tensor {
        let inputs = [self.0.max(), self.0.denominator()];
        let starts = inputs.map(|t| t.layout().start_offset() as u64);
        let sizes = self.sizes();
        let plan =
            states::log_sum_exp(Target::Metal, sizes.rows, sizes.partitions, starts).unwrap();
        run(&plan, &inputs, Mode::Checked).unwrap().0.remove(0)
    }

    fn dims(&self) -> [usize; 5] {
        self.0.numerator().dims().try_into().unwrap()
    }
}

fn unpacked(packed: &Tensor, [p, b, h, t, d]: [usize; 5]) -> AttentionPartials {
    let states = p * b * h * t;
    let part = |start, len| packed.narrow(0, start, len).unwrap();
    AttentionPartials::new(
        part(0, states).reshape((p, b, h, t)).unwrap(),
        part(states, states).reshape((p, b, h, t)).unwrap(),
        part(2 * states, states * d)
            .reshape((p, b, h, t, d))
            .unwrap(),
    )
    .unwrap()
}

/// States of `rows` rows in as many partitions as `states` has, of `dim` elements each.
fn made(states: &[Vec<(f32, f32)>], numerators: &[f32], dim: usize) -> AttentionPartials {
    let (partitions, rows) = (states.len(), states[0].len());
    let all: Vec<(f32, f32)> = states.iter().flatten().copied().collect();
    let pick = |f: fn(&(f32, f32)) -> f32| -> Tensor {
        let values: Vec<f32> = all.iter().map(f).collect();
        Tensor::from_vec(values, (partitions, 1, 1, rows), &Device::Cpu).unwrap()
    };
    let numerators =
        Tensor::from_slice(numerators, (partitions, 1, 1, rows, dim), &Device::Cpu).unwrap();
    AttentionPartials::new(pick(|s| s.0), pick(|s| s.1), numerators).unwrap()
}

fn fused(tokens: u32, heads: u32, stage: bool) -> Route {
    Route::Fused(Tiling {
        tokens,
        heads,
        stage,
    })
}

fn states_of(qkv: &[Tensor; 3], partitions: usize, route: Route) -> Result<AttentionPartials> {
    let [q, k, v] = qkv;
    let g = AttentionGeometry::new("attention_d512", q, k, v, true)?;
    let plan = plan_states(&g, &Partitions::new(g.kv_len, partitions)?, SCALE, route)?;
    let packed = run(&plan, &[q, k, v], Mode::Checked).unwrap().0.remove(0);
    Ok(unpacked(
        &packed,
        [partitions, g.batch, g.q_heads, g.q_len, 512],
    ))
}

#[test]
fn every_first_pass_leaves_the_states_that_the_cpu_leaves() -> Result<()> {
    let routes = [
        fused(4, 1, true),
        fused(8, 1, false),
        fused(4, 2, true),
        Route::Matrix,
    ];
    // 33 keys in 7 partitions of 5 are too short for matrices; 20 partitions of 2 leave the last 3 empty.
    for (kv_len, partitions) in [(70, 3), (33, 7), (33, 20)] {
        let qkv = inputs(1, (2, 4, 2, 1, kv_len))?;
        let [q, k, v] = &qkv;
        let want = AttentionD512::new(SCALE)
            .partitions(partitions)
            .partials(q, k, v)?;
        for route in routes {
            if route == Route::Matrix && kv_len / partitions < 8 {
                continue;
            }
            let got = states_of(&qkv, partitions, route)?;
            for (got, want) in [
                (got.max(), want.max()),
                (got.denominator(), want.denominator()),
                (got.numerator(), want.numerator()),
            ] {
                let error = difference(got, want)?;
                assert!(error < 2e-5, "{route:?}, {partitions}: {error:e}");
            }
        }
        if partitions == 20 {
            let got = states_of(&qkv, partitions, routes[0])?;
            for p in 17..20 {
                assert!(flat(&got.max().i(p)?)?.iter().all(|m| *m == EMPTY_MAX));
                assert!(flat(&got.denominator().i(p)?)?.iter().all(|d| *d == 0.0));
            }
        }
    }
    Ok(())
}

#[test]
fn the_staged_route_refuses_to_leave_states() {
    let qkv = inputs(1, (1, 1, 1, 1, 9)).unwrap();
    insta::assert_snapshot!(
        refusal(states_of(&qkv, 2, Route::Staged)),
        @"attention_d512: the staged route leaves no partial states, want the fused or the matrix route"
    );
}

#[test]
fn merged_finished_and_summed_states_are_those_of_the_cpu() -> Result<()> {
    for (dims, partitions) in [
        ((1, 4, 2, 1, 40), 1),
        ((2, 4, 2, 3, 40), 7),
        ((1, 2, 1, 1, 5), 33),
    ] {
        let [q, k, v] = inputs(2, dims)?;
        let states = AttentionD512::new(SCALE)
            .partitions(partitions)
            .partials(&q, &k, &v)?;
        let metal = OnMetal(&states);
        let (got, want) = (
            metal.merge(),
            AttentionPartials::merge(std::slice::from_ref(&states))?,
        );
        assert_eq!(bits(got.max())?, bits(want.max())?);
        for (got, want) in [
            (got.denominator(), want.denominator()),
            (got.numerator(), want.numerator()),
            (&metal.finish(DType::F32), &states.finish(DType::F32)?),
            (
                &metal.log_sum_exp().reshape(dims_of(&states))?,
                &states.log_sum_exp()?,
            ),
        ] {
            let error = difference(got, want)?;
            assert!(error < 1e-5, "{partitions} partitions: {error:e}");
        }
        for dtype in [DType::F16, DType::BF16] {
            let got = metal.finish(dtype);
            assert_eq!(got.dtype(), dtype);
            let want = states.finish(dtype)?;
            let error = difference(&got, &want)?;
            assert!(error < 8e-3, "{dtype:?}: {error:e}");
        }
    }
    Ok(())
}

fn difference(got: &Tensor, want: &Tensor) -> Result<f64> {
    let want: Vec<f64> = flat(want)?.iter().map(|x| f64::from(*x)).collect();
    max_error(got, &want)
}

fn dims_of(states: &AttentionPartials) -> Vec<usize> {
    states.max().dims()[1..].to_vec()
}

#[test]
fn merging_with_an_empty_state_is_the_identity_bit_for_bit() -> Result<()> {
    let (seen, empty) = ((1.5, 2.25), (EMPTY_MAX, 0.0));
    let dim = 17;
    let mut numerator = flat(&normal(3, dim, DType::F32)?)?;
    numerator[3] = -0.0;
    numerator[4] = 0.0;
    let nothing = vec![f32::NAN; dim];
    for order in [
        [false, true, false],
        [true, false, false],
        [false, false, true],
    ] {
        let states: Vec<Vec<(f32, f32)>> = order
            .iter()
            .map(|live| vec![if *live { seen } else { empty }])
            .collect();
        let numerators: Vec<f32> = order
            .iter()
            .flat_map(|live| {
                if *live {
                    numerator.clone()
                } else {
                    nothing.clone()
                }
            })
            .collect();
        let states = made(&states, &numerators, dim);
        let merged = OnMetal(&states).merge();
        assert_eq!(flat(merged.max())?, [seen.0]);
        assert_eq!(flat(merged.denominator())?, [seen.1]);
        let got: Vec<u32> = flat(merged.numerator())?
            .iter()
            .map(|x| x.to_bits())
            .collect();
        let want: Vec<u32> = numerator.iter().map(|x| x.to_bits()).collect();
        assert_eq!(got, want);
    }
    Ok(())
}

#[test]
fn rows_that_saw_no_key_are_zero_and_their_log_sum_exp_is_minus_infinity() -> Result<()> {
    let states = made(
        &vec![vec![(EMPTY_MAX, 0.0); 3]; 4],
        &[f32::NAN; 4 * 3 * 5],
        5,
    );
    let metal = OnMetal(&states);
    assert_eq!(flat(&metal.finish(DType::F32))?, [0.0; 15]);
    assert_eq!(flat(&metal.log_sum_exp())?, [f32::NEG_INFINITY; 3]);
    let merged = metal.merge();
    assert_eq!(flat(merged.max())?, [EMPTY_MAX; 3]);
    assert_eq!(flat(merged.denominator())?, [0.0; 3]);
    assert_eq!(flat(merged.numerator())?, [0.0; 15]);
    Ok(())
}

/// The CPU refuses them with an error; a GPU can't without being waited for.
#[test]
fn a_row_with_a_state_that_cannot_be_is_nan_and_no_other_row_is() -> Result<()> {
    let sound = (0.5, 1.5);
    // The least that can be.
    let least = made(&[vec![(0.5, f32::MIN_POSITIVE)]], &[0.0; 3], 3);
    assert_eq!(flat(&OnMetal(&least).finish(DType::F32))?, [0.0; 3]);
    for wrong in [
        (0.5, -1.0),
        (0.5, f32::NAN),
        (0.5, f32::INFINITY),
        (0.5, 1e-40),
        (0.5, 0.0),
        (EMPTY_MAX, 1.0),
        (f32::NAN, 1.0),
        (f32::INFINITY, 1.0),
        (f32::NEG_INFINITY, 0.0),
    ] {
        let states = made(
            &[vec![sound, sound], vec![sound, wrong]],
            &[1.0; 2 * 2 * 3],
            3,
        );
        assert!(states.finish(DType::F32).is_err(), "{wrong:?}");
        let metal = OnMetal(&states);
        let out = flat(&metal.finish(DType::F32))?;
        assert!(
            out[..3].iter().all(|x| (x - 1.0 / 1.5).abs() < 1e-6),
            "{wrong:?}: {out:?}"
        );
        assert!(out[3..].iter().all(|x| x.is_nan()), "{wrong:?}: {out:?}");
        let lse = flat(&metal.log_sum_exp())?;
        assert!(lse[0].is_finite() && lse[1].is_nan(), "{wrong:?}: {lse:?}");
        let merged = metal.merge();
        for part in [merged.max(), merged.denominator(), merged.numerator()] {
            let part = flat(part)?;
            let (sound, wrong_row) = part.split_at(part.len() / 2);
            assert!(sound.iter().all(|x| x.is_finite()), "{wrong:?}: {part:?}");
            assert!(wrong_row.iter().all(|x| x.is_nan()), "{wrong:?}: {part:?}");
        }
    }
    Ok(())
}

/// Softmax has no value there; a 0 would look like one.
#[test]
fn a_row_whose_keys_all_score_minus_infinity_is_nan_as_on_the_cpu() -> Result<()> {
    let [q, _, v] = inputs(4, (1, 2, 1, 1, 20))?;
    let q = q.ones_like()?;
    let k = (v.ones_like()? * f64::NEG_INFINITY)?;
    let qkv = [q, k, v];
    let [q, k, v] = &qkv;
    let cpu = flat(&AttentionD512::new(SCALE).partitions(3).forward(q, k, v)?)?;
    assert!(cpu.iter().all(|x| x.is_nan()));
    for route in [fused(4, 1, true), fused(8, 1, false)] {
        let call = Call {
            qkv: qkv.each_ref(),
            scale: SCALE,
            partitions: 2,
            causal: true,
            route,
        };
        let out = flat(&call.run(Mode::Checked).unwrap().out)?;
        assert!(out.iter().all(|x| x.is_nan()), "{route:?}");
    }
    Ok(())
}

#[test]
fn thirteen_tokens_of_seventeen_dims_finish_to_the_same_in_any_cut() -> Result<()> {
    let scores: Vec<f64> = (0..13).map(|t| ((t * 7 % 13) as f64 - 6.0) * 0.5).collect();
    let value = |t: usize, d: usize| ((t * 5 + d * 3) % 11) as f64 / 4.0 - 1.0;
    let sum: f64 = scores.iter().map(|s| s.exp()).sum();
    for partitions in [1, 2, 3, 4, 7, 16] {
        let cut = Partitions::new(13, partitions)?;
        let (mut states, mut numerators) = (vec![], vec![]);
        for p in 0..partitions {
            let keys = cut.range(p);
            let max = keys.clone().map(|t| scores[t]).fold(f64::MIN, f64::max);
            if keys.is_empty() {
                states.push(vec![(EMPTY_MAX, 0.0)]);
                numerators.extend([f32::NAN; 17]);
                continue;
            }
            let weight = |t: usize| (scores[t] - max).exp();
            states.push(vec![(
                max as f32,
                keys.clone().map(weight).sum::<f64>() as f32,
            )]);
            numerators.extend(
                (0..17).map(|d| keys.clone().map(|t| weight(t) * value(t, d)).sum::<f64>() as f32),
            );
        }
        let states = made(&states, &numerators, 17);
        let out = flat(&OnMetal(&states).finish(DType::F32))?;
        for (d, got) in out.iter().enumerate() {
            let want: f64 = (0..13).map(|t| scores[t].exp() * value(t, d)).sum::<f64>() / sum;
            assert!(
                (f64::from(*got) - want).abs() < 1e-6,
                "{partitions}, {d}: {got} {want}"
            );
        }
    }
    Ok(())
}

/// States that are in range each can add up past it.
#[test]
fn sums_past_the_range_of_f32_are_nan_where_the_cpu_refuses_them() -> Result<()> {
    let large = (0.0, 3e38);
    let states = made(&[vec![large], vec![large]], &[1.0; 2 * 3], 3);
    assert!(states.finish(DType::F32).is_err());
    assert!(states.log_sum_exp().is_err());
    let metal = OnMetal(&states);
    let merged = metal.merge();
    for out in [
        &metal.finish(DType::F32),
        &metal.log_sum_exp(),
        merged.denominator(),
        merged.numerator(),
    ] {
        assert!(flat(out)?.iter().all(|x| x.is_nan()), "{out}");
    }
    // Of a numerator, the elements that it reaches.
    for wrong in [f32::INFINITY, f32::NAN, 3e38] {
        let states = made(
            &[vec![(0.0, 1.0)], vec![(0.0, 1.0)]],
            &[1.0, wrong, 1.0, 1.0, wrong, 1.0],
            3,
        );
        assert!(states.finish(DType::F32).is_err());
        let metal = OnMetal(&states);
        for out in [
            flat(&metal.finish(DType::F32))?,
            flat(metal.merge().numerator())?,
        ] {
            assert!(
                out[0].is_finite() && out[1].is_nan() && out[2].is_finite(),
                "{wrong}: {out:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn log_sum_exp_has_every_row_of_many() -> Result<()> {
    let rows = 600;
    let states: Vec<(f32, f32)> = (0..rows)
        .map(|i| (i as f32 * 0.01, 1.0 + i as f32))
        .collect();
    let states = made(&[states], &vec![0.0; rows * 2], 2);
    let got = flat(&OnMetal(&states).log_sum_exp())?;
    let want = flat(&states.log_sum_exp()?)?;
    for (got, want) in got.iter().zip(&want) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
    assert_eq!(got.len(), rows);
    Ok(())
}
