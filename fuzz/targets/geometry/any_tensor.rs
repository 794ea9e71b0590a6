//! Tensors that no op was made for, and how tensors that it was made for may lie.

use arbitrary::{Result, Unstructured};
use candle::{DType, Device, Tensor};

pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Dimensions that an op may be asked for, the last of which is often one of `widths`.
fn dims(u: &mut Unstructured, widths: &[usize]) -> Result<Vec<usize>> {
    let rank = u.int_in_range(0..=5)?;
    let mut dims: Vec<usize> = (0..rank)
        .map(|_| u.int_in_range(0..=4))
        .collect::<Result<_>>()?;
    if let Some(last) = dims.last_mut().filter(|_| u.ratio(7, 8).unwrap_or(true)) {
        *last = *u.choose(widths)?;
    }
    Ok(dims)
}

/// Zeros of any shape and type: with their own strides, transposed, a window into more of them, or one number seen many times.
pub fn any_tensor(u: &mut Unstructured, widths: &[usize]) -> Result<Tensor> {
    let (mut dims, device) = (dims(u, widths)?, &Device::Cpu);
    let others = [DType::F64, DType::U32, DType::I64, DType::U8];
    let dtype = match u.ratio(1, 8)? {
        true => *u.choose(&others)?,
        false => *u.choose(&FLOATS)?,
    };
    let rank = dims.len();
    let made = match u.int_in_range(0..=4)? {
        0 if rank >= 2 => {
            let (a, b) = (u.choose_index(rank)?, u.choose_index(rank)?);
            dims.swap(a, b);
            Tensor::zeros(dims, dtype, device).and_then(|t| t.transpose(a, b))
        }
        1 if rank >= 1 => {
            let at = u.choose_index(rank)?;
            let (before, after) = (u.int_in_range(0..=3)?, u.int_in_range(0..=3)?);
            let len = dims[at];
            dims[at] += before + after;
            Tensor::zeros(dims, dtype, device).and_then(|t| t.narrow(at, before, len))
        }
        2 => Tensor::zeros((), dtype, device).and_then(|t| t.broadcast_as(dims)),
        _ => Tensor::zeros(dims, dtype, device),
    };
    Ok(made.expect("a small tensor"))
}

/// The same values as `t` with other strides and offset; NaN where no element of it is.
pub fn laid(u: &mut Unstructured, t: Tensor) -> Result<Tensor> {
    let (rank, dims) = (t.rank(), t.dims().to_vec());
    let nan = |at: usize, len: usize| {
        let mut dims = dims.clone();
        dims[at] = len;
        Tensor::full(f32::NAN, dims, &Device::Cpu)?.to_dtype(t.dtype())
    };
    let at = u.choose_index(rank)?;
    let (before, after) = (u.int_in_range(0..=9)?, u.int_in_range(0..=9)?);
    let within = |at: usize| -> candle::Result<Tensor> {
        Tensor::cat(&[&nan(at, before)?, &t, &nan(at, after)?], at)?.narrow(at, before, dims[at])
    };
    let laid = match u.int_in_range(0..=2)? {
        0 => Ok(t.clone()),
        1 => within(at),
        // Other dimensions than the last change places.
        _ => match rank.checked_sub(2) {
            Some(last) if last > 0 => {
                let (a, b) = (at.min(last), last - at.min(last));
                t.transpose(a, b)
                    .and_then(|t| t.contiguous()?.transpose(a, b))
            }
            _ => within(0),
        },
    };
    Ok(laid.expect("the same values"))
}

/// Whether all of it is 0.
pub fn is_zero(t: &Tensor) -> bool {
    let values = t
        .to_dtype(DType::F32)
        .and_then(|t| t.flatten_all()?.to_vec1::<f32>());
    values.expect("numbers").iter().all(|x| *x == 0.0)
}

/// An error begins with the name of whose it is.
pub fn assert_named(error: candle::Error, names: &[&str]) {
    let text = crate::common::message(error);
    let named = |name: &&str| {
        let rest = text.strip_prefix(*name);
        rest.is_some_and(|rest| rest.starts_with(": "))
    };
    assert!(names.iter().any(named), "{text}");
}
