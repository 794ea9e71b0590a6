//! Partial attention states and their merge.
//!
//! A state of one query row over some keys is `(max, denominator, numerator)`, un-normalised and in f32 whatever the
//! inputs are: with scores `x_t`, `max = max x_t`, `denominator = sum exp(x_t - max)`,
//! `numerator = sum exp(x_t - max) v_t`. States over disjoint keys merge into the state over their union.

mod ops;

use crate::memory;
use candle::{bail, CustomOp3, DType, Result, Tensor};
use ops::{FinishStates, LogSumExp, MergeStates};

const NAME: &str = "attention_partials";

/// The maximum of a state that has seen no key: finite, so that `exp(max - max)` is 1 and never NaN.
pub const EMPTY_MAX: f32 = f32::MIN;

/// Partial states of a grid of query rows, one per partition: what lets a caller attend to a prefix and a suffix
/// separately and merge.
///
/// All tensors are f32 and partition-major: `max` and `denominator` are `(partitions, batch, heads, q_len)`,
/// `numerator` is `(partitions, batch, heads, q_len, dim)`, for any `dim`. The state of a row that saw no key is
/// `max = EMPTY_MAX`, `denominator = 0`; its numerator is never read. So is that of a row whose scores are all -infinity, since
/// other keys may still count.
///
/// ```
/// use candle::{DType, Device, Tensor};
/// use gem::attention::{AttentionD512, AttentionPartials};
/// # fn main() -> candle::Result<()> {
/// let q = Tensor::ones((1, 8, 1, 512), DType::F32, &Device::Cpu)?;
/// let kv = Tensor::ones((1, 2, 48, 512), DType::F32, &Device::Cpu)?;
/// let op = AttentionD512::new(0.044);
/// let prefix = op.partials(&q, &kv.narrow(2, 0, 40)?, &kv.narrow(2, 0, 40)?)?;
/// let suffix = op.partials(&q, &kv.narrow(2, 40, 8)?, &kv.narrow(2, 40, 8)?)?;
/// let out = AttentionPartials::merge(&[prefix, suffix])?.finish(DType::F32)?;
/// assert_eq!(out.dims(), [1, 8, 1, 512]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct AttentionPartials {
    max: Tensor,
    denominator: Tensor,
    numerator: Tensor,
}

impl AttentionPartials {
    /// States computed elsewhere. Refuses other dtypes than f32 and shapes that do not fit together; the values are
    /// checked where they are used.
    pub fn new(max: Tensor, denominator: Tensor, numerator: Tensor) -> Result<Self> {
        let named = [
            ("max", &max),
            ("denominator", &denominator),
            ("numerator", &numerator),
        ];
        for (name, t) in named {
            if t.dtype() != DType::F32 {
                bail!(
                    "attention_partials: {name} has dtype {:?}, want f32",
                    t.dtype()
                );
            }
        }
        let (p, batch, heads, q_len, dim) = match *numerator.dims() {
            [p, b, h, t, d] if [p, b, h, t, d].iter().all(|&n| n > 0) => (p, b, h, t, d),
            ref dims => bail!(
                "attention_partials: numerator has shape {dims:?}, want a non-empty (partitions, batch, heads, q_len, dim)"
            ),
        };
        for (name, t) in &named[..2] {
            if t.dims() != [p, batch, heads, q_len] {
                bail!(
                    "attention_partials: {name} has shape {:?}, want {:?} to go with a numerator of dim {dim}",
                    t.dims(),
                    [p, batch, heads, q_len]
                );
            }
        }
        // Whatever counts states or elements from here on is a product of some of these.
        let what = format_args!("states with a numerator of shape {:?}", numerator.dims());
        let with_sums = dim.saturating_add(2);
        memory::addressable(NAME, what, &[p, batch, heads, q_len, with_sums], 4)?;
        Ok(Self {
            max,
            denominator,
            numerator,
        })
    }

    /// From one flat tensor that holds maxima, denominators and numerators in this order. Three views of one op's
    /// result, so that the gradient of each leads to that op's refusal.
    pub(super) fn unpack(
        packed: &Tensor,
        [p, batch, heads, q_len, dim]: [usize; 5],
    ) -> Result<Self> {
        let states = p * batch * heads * q_len;
        let part = |start, len| packed.narrow(0, start, len);
        Ok(Self {
            max: part(0, states)?.reshape((p, batch, heads, q_len))?,
            denominator: part(states, states)?.reshape((p, batch, heads, q_len))?,
            numerator: part(2 * states, states * dim)?.reshape((p, batch, heads, q_len, dim))?,
        })
    }

    /// `(partitions, batch, heads, q_len)`.
    pub fn max(&self) -> &Tensor {
        &self.max
    }

    /// `(partitions, batch, heads, q_len)`.
    pub fn denominator(&self) -> &Tensor {
        &self.denominator
    }

    /// `(partitions, batch, heads, q_len, dim)`.
    pub fn numerator(&self) -> &Tensor {
        &self.numerator
    }

    /// One state per row over the keys of all partitions of all `parts`, which must be disjoint sets of keys.
    ///
    /// The order is fixed (parts as given, partitions ascending), so results repeat bit for bit. A state that cannot
    /// occur is an error on the CPU: a NaN or negative denominator, a denominator of 0 under a maximum, a denominator
    /// without one. A GPU would have to be waited for to say so: there the row becomes NaN, here and in the other two,
    /// and of a numerator that is not finite the elements that it reaches.
    pub fn merge(parts: &[Self]) -> Result<Self> {
        let Some(first) = parts.first() else {
            bail!("attention_partials: got no parts to merge, want at least one");
        };
        for (i, part) in parts.iter().enumerate() {
            if part.numerator.dims()[1..] != first.numerator.dims()[1..] {
                bail!(
                    "attention_partials: part {i} has rows of shape {:?}, part 0 has {:?}, want the same",
                    &part.numerator.dims()[1..],
                    &first.numerator.dims()[1..]
                );
            }
        }
        let (_, batch, heads, q_len, dim) = first.numerator.dims5()?;
        let partitions = parts.iter().map(|part| part.numerator.dims()[0]);
        let partitions = partitions.fold(0usize, usize::saturating_add);
        let what = format_args!("{partitions} states of each row of ({batch}, {heads}, {q_len})");
        let all = [partitions, batch, heads, q_len, dim + 2];
        memory::check(NAME, what, &all, 4, first.max.device())?;
        let cat = |pick: fn(&Self) -> &Tensor| {
            Tensor::cat(&parts.iter().map(pick).collect::<Vec<_>>(), 0)
        };
        let all = Self {
            max: cat(Self::max)?,
            denominator: cat(Self::denominator)?,
            numerator: cat(Self::numerator)?,
        };
        let (_, batch, heads, q_len, dim) = all.numerator.dims5()?;
        let packed = all.apply(MergeStates)?;
        Self::unpack(&packed, [1, batch, heads, q_len, dim])
    }

    /// `numerator / denominator` over all partitions, `(batch, heads, q_len, dim)` in `dtype` (f32, f16 or bf16).
    /// A row that saw no key is exactly 0, and so is one whose scores are all -infinity, where
    /// [`attention_d512`](super::attention_d512), which knows that there were keys, gives NaN as softmax does: the states of both are the
    /// same. Errors as [`AttentionPartials::merge`].
    pub fn finish(&self, dtype: DType) -> Result<Tensor> {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            bail!("attention_partials: cannot finish as {dtype:?}, want f32, f16 or bf16");
        }
        self.apply(FinishStates { dtype })
    }

    /// Natural logarithm of the sum of `exp(score)` over all partitions, f32 `(batch, heads, q_len)`. A row that saw no
    /// key, or none that scored more than -infinity, is `-inf`. Errors as [`AttentionPartials::merge`].
    pub fn log_sum_exp(&self) -> Result<Tensor> {
        self.check_copies(&[&self.max, &self.denominator])?;
        self.max
            .contiguous()?
            .apply_op2(&self.denominator.contiguous()?, LogSumExp)
    }

    fn apply<C: CustomOp3 + Send + Sync + 'static>(&self, op: C) -> Result<Tensor> {
        self.check_copies(&[&self.max, &self.denominator, &self.numerator])?;
        self.max.contiguous()?.apply_op3(
            &self.denominator.contiguous()?,
            &self.numerator.contiguous()?,
            op,
        )
    }

    /// Fails if there is no memory for the contiguous copies of views.
    fn check_copies(&self, tensors: &[&Tensor]) -> Result<()> {
        for t in tensors.iter().filter(|t| !t.is_contiguous()) {
            let what = format_args!("a contiguous copy of states of shape {:?}", t.dims());
            memory::check(NAME, what, t.dims(), 4, t.device())?;
        }
        Ok(())
    }
}

/// Merges the states of one row, in the order given, into `out`; returns max and denominator.
///
/// Empty states are skipped whole, so that merging with one is the identity bit for bit and nothing that its numerator
/// holds can leak. All empty gives the empty state. NaN passes through.
pub(super) fn merge_row<'a>(
    states: impl Iterator<Item = (f32, f32, &'a [f32])> + Clone,
    out: &mut [f32],
) -> (f32, f32) {
    let live = states.filter(|(_, denominator, _)| *denominator != 0.0);
    let max = live.clone().fold(EMPTY_MAX, |max, (m, _, _)| m.max(max));
    let mut sum = 0.0;
    let mut first = true;
    for (m, denominator, numerator) in live {
        let weight = (m - max).exp();
        sum += denominator * weight;
        let pairs = out.iter_mut().zip(numerator);
        if std::mem::take(&mut first) {
            pairs.for_each(|(out, o)| *out = o * weight);
        } else {
            pairs.for_each(|(out, o)| *out += o * weight);
        }
    }
    if first {
        out.fill(0.0);
    }
    (max, sum)
}

/// Fails closed on a state that no set of finite scores and values has.
fn check_state(max: f32, denominator: f32, numerator: &[f32]) -> Result<()> {
    let empty = denominator == 0.0;
    let sum = denominator == 0.0 || (denominator.is_normal() && denominator > 0.0);
    if !sum {
        bail!("attention_partials: a state has denominator {denominator}, want 0 or a finite sum of exponentials that is no subnormal");
    }
    if !max.is_finite() {
        bail!("attention_partials: a state has maximum {max}, want a finite one (empty states use {EMPTY_MAX:e})");
    }
    if empty && max != EMPTY_MAX {
        bail!("attention_partials: a state has maximum {max} but denominator 0, want at least 1 once a key was seen");
    }
    if !empty && max == EMPTY_MAX {
        bail!("attention_partials: a state has denominator {denominator} but the maximum of an empty state");
    }
    if !empty && !numerator.iter().all(|x| x.is_finite()) {
        bail!("attention_partials: a numerator of a state with denominator {denominator} is not finite");
    }
    Ok(())
}

/// The normalised row of its states, and their denominator; 0 both if all are empty.
pub(super) fn finish_row<'a>(
    states: impl Iterator<Item = (f32, f32, &'a [f32])> + Clone,
    out: &mut [f32],
) -> f32 {
    let mut live = states
        .clone()
        .filter(|(_, denominator, _)| *denominator != 0.0);
    let (denominator, alone) = match (live.next(), live.next()) {
        // The weight of a lone state is 1.
        (Some((_, denominator, numerator)), None) => (denominator, Some(numerator)),
        _ => (merge_row(states, out).1, None),
    };
    // One division per row; at a single key 512 of them were half of the time.
    let reciprocal = if denominator == 0.0 {
        0.0
    } else {
        1.0 / denominator
    };
    match alone {
        Some(numerator) => {
            let pairs = out.iter_mut().zip(numerator);
            pairs.for_each(|(out, o)| *out = o * reciprocal);
        }
        None => out.iter_mut().for_each(|o| *o *= reciprocal),
    }
    denominator
}
