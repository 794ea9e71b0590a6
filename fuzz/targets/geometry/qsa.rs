use crate::any_tensor::{any_tensor, assert_named};
use crate::qsa_definition::assert_defined;
use crate::qsa_support::{state_at, Rows};
use arbitrary::{Result, Unstructured};
use candle::{DType, Device, Tensor};
use gem::qsa::{qsa_prep, QsaChunk, QsaInputs, QsaNorms, QsaState};

const NAME: &[&str] = &["qsa_prep"];

/// Mostly zeros of the shape and type that are wanted.
fn maybe(u: &mut Unstructured, shape: &[usize]) -> Result<Tensor> {
    match u.ratio(1, 8)? {
        true => any_tensor(u, &[shape[shape.len() - 1], 128, 512]),
        false => Ok(Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()),
    }
}

fn position(u: &mut Unstructured) -> Result<usize> {
    Ok(match u.int_in_range(0..=7)? {
        0 => u.arbitrary()?,
        1 => 0,
        _ => u.int_in_range(1..=9000)?,
    })
}

pub fn any(u: &mut Unstructured) -> Result<()> {
    let [q, k, iq, ik] = [256, 256, 128, 128].map(|len| maybe(u, &[len]));
    let norms = match QsaNorms::new(&q?, &k?, &iq?, &ik?) {
        Ok(norms) => norms,
        Err(e) => {
            assert_named(e, NAME);
            return Ok(());
        }
    };
    let pos = position(u)?;
    let state = match QsaState::new(pos, &maybe(u, &[3, 128])?, &maybe(u, &[128])?) {
        Ok(state) => state,
        Err(e) => {
            assert_named(e, NAME);
            return Ok(());
        }
    };
    let tokens = match u.ratio(1, 16)? {
        // The angles of many tokens take long.
        true => *u.choose(&[0, usize::MAX, 1 << 21])?,
        false => u.int_in_range(1..=5)?,
    };
    let pos0 = if u.ratio(7, 8)? { pos } else { position(u)? };
    let chunk = match QsaChunk::new(pos0, tokens, &Device::Cpu) {
        Ok(chunk) => chunk,
        Err(e) => {
            assert_named(e, NAME);
            return Ok(());
        }
    };
    let [q, k, v, ik, iq] = [24 * 512, 512, 512, 128, 512].map(|width| maybe(u, &[tokens, width]));
    let (q, k, v, ik, iq) = (q?, k?, v?, ik?, iq?);
    let inputs = QsaInputs {
        q: &q,
        k: &k,
        v: &v,
        ik: &ik,
        iq: u.arbitrary::<bool>()?.then_some(&iq),
    };
    match qsa_prep(&inputs, &norms, &chunk, &state) {
        Ok(out) => assert_eq!(
            (out.qcur.dims(), out.state.pos()),
            (&[tokens, 24, 256][..], pos + tokens)
        ),
        Err(e) => assert_named(e, NAME),
    }
    Ok(())
}

pub fn defined(u: &mut Unstructured) -> Result<()> {
    let (seed, tokens) = (u.arbitrary::<u8>()?.into(), u.int_in_range(1..=9)?);
    let pos = match u.ratio(1, 4)? {
        true => 0,
        false => u.int_in_range(0..=1 << 24)?,
    };
    let rows = Rows::fused(seed, tokens).unwrap();
    let rows = match u.int_in_range(0..=3)? {
        0 => rows.separate().unwrap(),
        1 => rows.in_1152().unwrap(),
        2 => rows.without_iq(),
        _ => rows,
    };
    let rows = rows.q_as(if u.arbitrary()? {
        DType::F16
    } else {
        DType::F32
    });
    assert_defined(&rows.unwrap(), &state_at(pos).unwrap()).unwrap();
    Ok(())
}
