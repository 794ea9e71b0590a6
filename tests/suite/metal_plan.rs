//! What a GPU would be asked to do, and what it would not.

use crate::attention_support::{refusal, SCALE};
use candle::{DType, Device, Result, Tensor};
use gem::attention::gpu::{plan, plan_states, Route, Tiling};
use gem::attention::plan::Partitions;
use gem::attention::AttentionGeometry;
use gem::backend::plan::{Binding, Plan, Slot};

const STAGED: Route = Route::Fused(Tiling {
    tokens: 4,
    heads: 1,
    stage: true,
});

/// Zeros of which only the first row exists: shapes of any size cost nothing.
fn shaped(dims: [usize; 4], dtype: DType) -> Result<Tensor> {
    Tensor::zeros((1, 1, 1, dims[3]), dtype, &Device::Cpu)?.broadcast_as(&dims)
}

fn planned(q: &Tensor, k: &Tensor, v: &Tensor, partitions: usize, route: Route) -> Result<Plan> {
    let g = AttentionGeometry::new("attention_d512", q, k, v, true)?;
    plan(&g, &Partitions::new(g.kv_len, partitions)?, SCALE, route)
}

fn decode(heads: usize, kv_len: usize, dtype: DType) -> Result<[Tensor; 2]> {
    Ok([
        shaped([1, heads, 1, 512], dtype)?,
        shaped([1, 4, kv_len, 512], dtype)?,
    ])
}

/// The tables of docs/metal.md.
#[test]
fn scratch_and_threadgroup_memory_are_what_the_documents_say() -> Result<()> {
    let [q, kv] = decode(32, 65_536, DType::F32)?;
    for (partitions, maxima, numerators) in [
        (32, 4_096, 2_097_152),
        (64, 8_192, 4_194_304),
        (128, 16_384, 8_388_608),
        (256, 32_768, 16_777_216),
    ] {
        for route in [STAGED, Route::Matrix] {
            let plan = planned(&q, &kv, &kv, partitions, route)?;
            assert_eq!(plan.scratch, [maxima, maxima, numerators]);
        }
    }
    let tiling = |tokens, heads, stage| {
        Route::Fused(Tiling {
            tokens,
            heads,
            stage,
        })
    };
    for (route, threads, f32_bytes, half_bytes) in [
        (STAGED, 256, 16_384, 8_192),
        (tiling(8, 1, true), 256, 32_768, 16_384),
        (tiling(4, 2, true), 128, 16_384, 8_192),
        (tiling(4, 1, false), 256, 16, 16),
        (Route::Matrix, 256, 16_384, 16_384),
    ] {
        for (dtype, bytes) in [
            (DType::F32, f32_bytes),
            (DType::F16, half_bytes),
            (DType::BF16, half_bytes),
        ] {
            let [q, kv] = decode(32, 65_536, dtype)?;
            let plan = planned(&q, &kv, &kv, 32, route)?;
            let first = &plan.passes[0];
            assert_eq!(
                (first.threads, first.threadgroup_bytes),
                (threads, bytes),
                "{route:?} {dtype:?}"
            );
            assert_eq!(first.threadgroups, [32, 4, 1]);
        }
    }
    Ok(())
}

/// The second pass waits for the first only because of this.
#[test]
fn passes_are_ordered_by_what_they_bind() -> Result<()> {
    let [q, kv] = decode(32, 4096, DType::F32)?;
    let plan = planned(&q, &kv, &kv, 32, STAGED)?;
    let read = |slots: [Slot; 3]| slots.map(Binding::Read);
    let scratch = [0, 1, 2].map(Slot::Scratch);
    let first = [
        read([0, 1, 2].map(Slot::Input)),
        scratch.map(Binding::Write),
    ]
    .concat();
    let last = [&read(scratch)[..], &[Binding::Write(Slot::Output(0))]].concat();
    assert_eq!(plan.passes[0].buffers, first);
    assert_eq!(plan.passes[1].buffers, last);
    Ok(())
}

#[test]
fn partitions_without_a_key_cost_nothing_unless_their_states_are_asked_for() -> Result<()> {
    let [q, kv] = decode(8, 8, DType::F32)?;
    let plan = planned(&q, &kv, &kv, 1 << 20, STAGED)?;
    assert_eq!(plan.passes[0].threadgroups, [8, 4, 1]);
    assert_eq!(plan, planned(&q, &kv, &kv, 8, STAGED)?);
    let g = AttentionGeometry::new("attention_d512", &q, &kv, &kv, true)?;
    let states = plan_states(&g, &Partitions::new(8, 20)?, SCALE, STAGED)?;
    assert_eq!(states.outputs[0].elements, 20 * 8 * 514);
    Ok(())
}

#[test]
fn what_a_gpu_would_not_take_is_refused_with_its_reason() -> Result<()> {
    let [q, kv] = decode(32, 4096, DType::F32)?;
    let half = kv.to_dtype(DType::F16)?;
    insta::assert_snapshot!(
        refusal(planned(&q, &kv, &half, 32, STAGED)),
        @"attention_d512: k is F32 and v F16, want one dtype for both on a GPU"
    );
    let wide = Tensor::zeros((1, 4, 9, 516), DType::F32, &Device::Cpu)?;
    insta::assert_snapshot!(
        refusal(planned(&q, &wide.narrow(3, 1, 512)?, &wide.narrow(3, 0, 512)?, 1, STAGED)),
        @"attention_d512: k starts at element 1 with strides [18576, 4644, 516], want multiples of 4 on Metal"
    );
    let odd = Tensor::zeros((1, 32, 1, 514), DType::F32, &Device::Cpu)?.narrow(3, 0, 512)?;
    insta::assert_snapshot!(
        refusal(planned(&odd, &kv, &kv, 1, STAGED)),
        @"attention_d512: q starts at element 0 with strides [16448, 514, 514], want multiples of 4 on Metal"
    );
    let prompt = shaped([1, 32, 4096, 512], DType::F32)?;
    insta::assert_snapshot!(
        refusal(planned(&prompt, &kv, &kv, 64, STAGED)),
        @"attention_d512: the states of 131072 query rows in 64 partitions take 17246978048 bytes, want at most 4294967296 on a GPU: fewer partitions, or fewer rows at a time"
    );
    let batch = shaped([20_000, 4, 1, 512], DType::F32)?;
    let kv_batch = shaped([20_000, 4, 1, 512], DType::F32)?;
    insta::assert_snapshot!(
        refusal(planned(&batch, &kv_batch, &kv_batch, 1, STAGED)),
        @"attention_d512: attention_d512_partial_f32_tile4_heads1_staged needs a grid of [1, 80000, 1] threadgroups, want at most [2147483647, 65535, 65535]"
    );
    let long = shaped([1, 1, 1 << 32, 512], DType::F32)?;
    let one = shaped([1, 1, 1, 512], DType::F32)?;
    insta::assert_snapshot!(
        refusal(planned(&one, &long, &long, 32, STAGED)),
        @"attention_d512: kv_len is 4294967296, want less than 2^31 on a GPU"
    );
    for (kv_len, partitions) in [(7, 1), (14, 2)] {
        let [q, kv] = decode(32, kv_len, DType::F32)?;
        let refused = refusal(planned(&q, &kv, &kv, partitions, Route::Matrix));
        assert!(
            refused.contains("want") && refused.contains("at least 8 keys, got 7"),
            "{refused}"
        );
    }
    let [q, kv] = decode(32, 8, DType::F32)?;
    assert!(planned(&q, &kv, &kv, 1, Route::Matrix).is_ok());
    Ok(())
}
