//! What qsa_prep refuses, and in which words.

use crate::qsa_support::{norms, refusal, state_at, uniform, Rows};
use candle::{DType, Device, Result, Tensor, Var};
use gem::backend::plan::Plan;
use gem::qsa::prep::geometry::PrepGeometry;
use gem::qsa::prep::gpu;
use gem::qsa::{qsa_prep, QsaChunk, QsaNorms, QsaState};

fn zeros(shape: impl Into<candle::Shape>) -> Result<Tensor> {
    Tensor::zeros(shape, DType::F32, &Device::Cpu)
}

fn rows() -> Result<Rows> {
    Rows::fused(1, 3)
}

fn refused(rows: &Rows) -> String {
    let (state, norms) = (state_at(0).unwrap(), norms().unwrap());
    let chunk = QsaChunk::new(0, 3, &Device::Cpu).unwrap();
    let error = refusal(qsa_prep(&rows.inputs(), &norms, &chunk, &state));
    let geometry = PrepGeometry::new(&rows.inputs(), &norms, &chunk, &state);
    assert_eq!(refusal(geometry), error);
    error
}

#[test]
fn a_shape_that_does_not_fit_is_named_with_what_it_should_be() -> Result<()> {
    let r = rows()?;
    insta::assert_snapshot!(refused(&Rows { q: zeros((3, 6144))?, ..r.clone() }), @"qsa_prep: q has shape [3, 6144], want [3, 12288] for the 3 tokens of the chunk");
    insta::assert_snapshot!(refused(&Rows { q: zeros((3, 24, 512))?, ..r.clone() }), @"qsa_prep: q has shape [3, 24, 512], want [3, 12288] for the 3 tokens of the chunk");
    insta::assert_snapshot!(refused(&Rows { k: zeros((4, 512))?, ..r.clone() }), @"qsa_prep: k has shape [4, 512], want [3, 512] for the 3 tokens of the chunk");
    insta::assert_snapshot!(refused(&Rows { v: zeros((3, 256))?, ..r.clone() }), @"qsa_prep: v has shape [3, 256], want [3, 512] for the 3 tokens of the chunk");
    insta::assert_snapshot!(refused(&Rows { ik: zeros(128)?, ..r.clone() }), @"qsa_prep: ik has shape [128], want [3, 128] for the 3 tokens of the chunk");
    insta::assert_snapshot!(refused(&Rows { iq: Some(zeros((0, 512))?), ..r }), @"qsa_prep: iq has shape [0, 512], want [3, 512] for the 3 tokens of the chunk");
    Ok(())
}

#[test]
fn dtypes_and_strides_are_refused_by_tensor() -> Result<()> {
    let r = rows()?;
    insta::assert_snapshot!(refused(&r.q_as(DType::BF16)?), @"qsa_prep: q has dtype BF16, want f32 or f16");
    insta::assert_snapshot!(refused(&Rows { k: r.k.to_dtype(DType::F16)?, ..r.clone() }), @"qsa_prep: k has dtype F16, want f32");
    insta::assert_snapshot!(refused(&Rows { iq: Some(zeros((3, 512))?.to_dtype(DType::F64)?), ..r.clone() }), @"qsa_prep: iq has dtype F64, want f32");
    insta::assert_snapshot!(refused(&Rows { v: zeros((512, 3))?.t()?, ..r.clone() }), @"qsa_prep: the last dimension of v must be contiguous, want stride 1, got strides [1, 3]");
    insta::assert_snapshot!(refused(&Rows { ik: zeros((3, 1))?.broadcast_as((3, 128))?, ..r }), @"qsa_prep: the last dimension of ik must be contiguous, want stride 1, got strides [1, 0]");
    Ok(())
}

#[test]
fn a_chunk_without_tokens_or_past_every_position_is_refused() {
    let refused = |pos0, tokens| refusal(QsaChunk::new(pos0, tokens, &Device::Cpu));
    insta::assert_snapshot!(refused(5, 0), @"qsa_prep: got a chunk of 0 tokens, want at least 1");
    insta::assert_snapshot!(refused(0, 1 << 21), @"qsa_prep: got a chunk of 2097152 tokens, want at most 1048576");
    insta::assert_snapshot!(refused(usize::MAX, 1), @"qsa_prep: 1 tokens from position 18446744073709551615 on pass position 9007199254740992");
    insta::assert_snapshot!(refused((1 << 53) - 1, 2), @"qsa_prep: 2 tokens from position 9007199254740991 on pass position 9007199254740992");
    assert!(QsaChunk::new((1 << 53) - 2, 2, &Device::Cpu).is_ok());
}

#[test]
fn a_state_of_another_position_is_refused() -> Result<()> {
    let (rows, norms) = (rows()?, norms()?);
    let call = |pos0, state: &QsaState| {
        let chunk = QsaChunk::new(pos0, 3, &Device::Cpu).unwrap();
        refusal(qsa_prep(&rows.inputs(), &norms, &chunk, state))
    };
    insta::assert_snapshot!(call(3, &state_at(0)?), @"qsa_prep: the state was left at position 0, the chunk begins at 3, want the same");
    insta::assert_snapshot!(call(0, &state_at(4)?), @"qsa_prep: the state was left at position 4, the chunk begins at 0, want the same");
    let after = rows.prep(&state_at(4)?)?.state;
    insta::assert_snapshot!(call(8, &after), @"qsa_prep: the state was left at position 7, the chunk begins at 8, want the same");
    assert_eq!(call(7, &after), "not refused");
    let state = |tail: Result<Tensor>, dead: Result<Tensor>| {
        refusal(QsaState::new(1, &tail.unwrap(), &dead.unwrap()))
    };
    insta::assert_snapshot!(state(zeros((4, 128)), zeros(128)), @"qsa_prep: tail has shape [4, 128], want [3, 128]");
    insta::assert_snapshot!(state(zeros((3, 128)), zeros((1, 128))), @"qsa_prep: dead has shape [1, 128], want [128]");
    insta::assert_snapshot!(state(zeros((3, 128)), zeros(128)?.to_dtype(DType::F16)), @"qsa_prep: dead has dtype F16, want f32");
    Ok(())
}

#[test]
fn norm_weights_of_another_length_or_dtype_are_refused() -> Result<()> {
    let [head, index] = [uniform(1, 256)?, uniform(2, 128)?];
    insta::assert_snapshot!(refusal(QsaNorms::new(&index, &head, &index, &index)), @"qsa_prep: g_q has shape [128], want [256]");
    insta::assert_snapshot!(refusal(QsaNorms::new(&head, &head, &head, &index)), @"qsa_prep: g_iq has shape [256], want [128]");
    insta::assert_snapshot!(refusal(QsaNorms::new(&head, &head, &index, &index.unsqueeze(0)?)), @"qsa_prep: g_ik has shape [1, 128], want [128]");
    insta::assert_snapshot!(refusal(QsaNorms::new(&head, &head.to_dtype(DType::F64)?, &index, &index)), @"qsa_prep: g_k has dtype F64, want f32, f16 or bf16");
    Ok(())
}

#[test]
fn weights_in_half_precision_are_widened() -> Result<()> {
    let weights = [256, 256, 128, 128].map(|n| uniform(n, n as usize).unwrap());
    for dtype in [DType::F16, DType::BF16] {
        let half = weights.each_ref().map(|w| w.to_dtype(dtype).unwrap());
        let [a, b, c, d] = &half;
        let packed = QsaNorms::new(a, b, c, d)?.packed().to_vec1::<f32>()?;
        let want = Tensor::cat(&half, 0)?
            .to_dtype(DType::F32)?
            .to_vec1::<f32>()?;
        assert_eq!(packed, want);
    }
    Ok(())
}

/// Results are made outside of candle's graph: a gradient must not get lost in silence.
#[test]
fn training_through_it_is_refused() -> Result<()> {
    let r = rows()?;
    let var = |t: &Tensor| Var::from_tensor(t).unwrap();
    insta::assert_snapshot!(refused(&Rows { q: var(&r.q).as_tensor().clone(), ..r.clone() }), @"qsa_prep: q is tracked for a gradient, there is no backward pass, want it detached");
    insta::assert_snapshot!(refused(&Rows { v: (var(&r.v).as_tensor() * 2.0)?, ..r.clone() }), @"qsa_prep: v is tracked for a gradient, there is no backward pass, want it detached");
    insta::assert_snapshot!(refused(&Rows { iq: Some(var(r.iq.as_ref().unwrap()).as_tensor().clone()), ..r.clone() }), @"qsa_prep: iq is tracked for a gradient, there is no backward pass, want it detached");
    assert_eq!(
        refused(&Rows {
            q: var(&r.q).as_tensor().detach(),
            ..r
        }),
        "not refused"
    );
    let [head, index] = [uniform(1, 256)?, uniform(2, 128)?];
    insta::assert_snapshot!(refusal(QsaNorms::new(&head, &var(&head), &index, &index)), @"qsa_prep: g_k is tracked for a gradient, there is no backward pass, want it detached");
    insta::assert_snapshot!(refusal(QsaState::new(1, &var(&zeros((3, 128))?), &index)), @"qsa_prep: tail is tracked for a gradient, there is no backward pass, want it detached");
    Ok(())
}

#[test]
fn known_strides_have_kernels_of_their_own() -> Result<()> {
    let entry = |rows: &Rows| -> Result<&'static str> {
        let chunk = QsaChunk::new(0, 3, &Device::Cpu)?;
        let g = PrepGeometry::new(&rows.inputs(), &norms()?, &chunk, &state_at(0)?)?;
        Ok(gpu::plan(&g).passes[0].entry)
    };
    let fused = rows()?;
    let halves = fused.q_as(DType::F16)?;
    assert_eq!(entry(&fused)?, "qsa_prep_f32_fused1664");
    assert_eq!(entry(&fused.without_iq())?, "qsa_prep_f32_fused1664");
    assert_eq!(entry(&fused.in_1152()?)?, "qsa_prep_f32_fused1152");
    assert_eq!(entry(&fused.separate()?)?, "qsa_prep_f32_separate");
    assert_eq!(
        entry(&halves.separate()?.without_iq())?,
        "qsa_prep_f16_separate"
    );
    // Columns of 1152 hold no iq, so this one lies elsewhere.
    let mixed = Rows {
        iq: fused.separate()?.iq,
        ..halves.in_1152()?
    };
    assert_eq!(entry(&mixed)?, "qsa_prep_f16_strided");
    Ok(())
}

#[test]
fn the_plan_is_one_pass_of_a_threadgroup_a_token_and_one_for_8_pooled_rows() -> Result<()> {
    let plan = |rows: &Rows| -> Result<Plan> {
        let chunk = QsaChunk::new(2, 31, &Device::Cpu)?;
        let g = PrepGeometry::new(&rows.inputs(), &norms()?, &chunk, &state_at(2)?)?;
        Ok(gpu::plan(&g))
    };
    let rows = Rows::fused(1, 31)?;
    let with_iq = plan(&rows)?;
    let [pass] = &with_iq.passes[..] else {
        panic!("{with_iq:?}")
    };
    // 8 blocks are complete, and the dead row.
    assert_eq!(pass.threadgroups, [31 + 2, 1, 1]);
    assert_eq!((pass.threads, pass.threadgroup_bytes), (256, 0));
    assert_eq!((with_iq.outputs.len(), &with_iq.scratch[..]), (8, &[][..]));
    let without = plan(&rows.without_iq())?;
    assert_eq!(
        (without.outputs.len(), &without.scratch[..]),
        (7, &[16][..])
    );
    Ok(())
}
