//! Attention where its inputs are on an NVIDIA GPU.

use super::gpu::cuda::plan;
use super::{AttentionD512, AttentionGeometry, Resulting, RotaryKeys};
use crate::backend::cuda::{chip, run_one};
use crate::backend::plan::Plan;
use candle::backend::BackendStorage;
use candle::{CudaDevice, CudaStorage, Layout, Result, Shape};

/// What is asked of the device, or why it can't be.
pub(super) fn planned(
    settings: &AttentionD512,
    g: &AttentionGeometry,
    keys: Option<&RotaryKeys>,
    device: &CudaDevice,
    result: &Resulting,
) -> Result<Plan> {
    let chip = chip(device)?;
    let states = matches!(result, Resulting::Partials);
    // The states that a caller gets are cut alike on every device.
    let settings = match settings.partitions {
        None if !states => settings.partitions(chip.partitions(g, keys)),
        _ => *settings,
    };
    let partitions = settings.plan(g)?;
    plan(
        g,
        keys,
        chip,
        &partitions,
        settings.softmax_scale,
        settings.route,
        states,
    )
}

pub(super) fn forward(
    settings: &AttentionD512,
    g: &AttentionGeometry,
    keys: Option<&RotaryKeys>,
    q_l: &Layout,
    inputs: &[&CudaStorage],
    result: &Resulting,
) -> Result<(CudaStorage, Shape)> {
    let Some(first) = inputs.first() else {
        candle::bail!("attention_d512: a call without inputs")
    };
    let plan = planned(settings, g, keys, first.device(), result)?;
    let out = run_one(&plan, inputs)?;
    let shape = match result {
        Resulting::Attention => q_l.shape().clone(),
        Resulting::Partials => Shape::from(plan.outputs.iter().map(|o| o.elements).sum::<usize>()),
    };
    Ok((out, shape))
}
