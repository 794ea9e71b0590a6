//! The fixtures themselves: that the weights made here are those the goldens were made with, and that the two
//! golden files of a fixture say the same.

use crate::common::fixture::{fixture_checkpoint, FIXTURES};
use crate::common::golden::{golden_tensors, Digest, Golden};
use crate::common::numeric::{max_abs_diff, nmse, normal, rms_diff};
use candle::{DType, Device, Result, Tensor};
use sha2::{Digest as _, Sha256};

#[test]
fn generated_weights_are_those_of_the_goldens_byte_for_byte() {
    for name in FIXTURES {
        let dir = fixture_checkpoint(name);
        let bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
        let sha256: String = Sha256::digest(&bytes)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(sha256, Golden::load(name).model_sha256, "{name}");
    }
}

#[test]
fn golden_digests_are_those_of_the_golden_tensors() -> Result<()> {
    for name in FIXTURES {
        let tensors = golden_tensors(name);
        for prompt in Golden::load(name).prompts {
            let n = prompt.length;
            assert_eq!(prompt.input_ids.len(), n);
            let Some(logits) = tensors.get(&format!("logits/{n}")) else {
                assert_eq!(n, 300, "only the long prompt goes without tensors");
                continue;
            };
            let last = Tensor::new(prompt.last_logits, &Device::Cpu)?;
            assert!(max_abs_diff(&last, &logits.get(n - 1)?)? < 1e-5);
            for at in &prompt.positions {
                let row = logits.get(at.pos)?;
                let (token, logit) = at.top5[0];
                assert_eq!(row.argmax(0)?.to_scalar::<u32>()?, token);
                assert!((row.get(token as usize)?.to_scalar::<f32>()? - logit).abs() < 1e-5);
                assert_digest(&row, at.l2, at.sum)?;
            }
            let hidden = &tensors[&format!("hidden/{n}")];
            for at in &prompt.hidden {
                let stages = std::iter::once(&at.embed)
                    .chain(&at.layers)
                    .chain([&at.final_norm]);
                assert_eq!(hidden.dim(0)?, at.layers.len() + 2);
                for (stage, Digest { l2, sum, first8 }) in stages.enumerate() {
                    let row = hidden.get(stage)?.get(at.pos)?;
                    assert_digest(&row, *l2, *sum)?;
                    let first8 = Tensor::new(first8.as_slice(), &Device::Cpu)?;
                    assert!(max_abs_diff(&row.narrow(0, 0, 8)?, &first8)? < 1e-4);
                }
            }
            let best = &prompt.positions[n - 1].top5;
            assert_eq!(prompt.greedy.tokens[0], best[0].0);
            assert!((prompt.greedy.top_logit[0] - best[0].1).abs() < 1e-5);
            assert!((prompt.greedy.margin[0] - (best[0].1 - best[1].1)).abs() < 1e-3);
        }
    }
    Ok(())
}

fn assert_digest(row: &Tensor, l2: f64, sum: f64) -> Result<()> {
    let row = row.to_dtype(DType::F64)?;
    assert!((row.sqr()?.sum_all()?.sqrt()?.to_scalar::<f64>()? - l2).abs() < 1e-6 * l2);
    assert!((row.sum_all()?.to_scalar::<f64>()? - sum).abs() < 1e-6 * l2);
    Ok(())
}

#[test]
fn distances_see_a_single_wrong_value_and_a_nan() -> Result<()> {
    let want = normal(1, (3, 7), DType::F32)?;
    let spike = |value: f32| {
        let mut values = vec![0f32; 21];
        values[20] = value;
        &want + Tensor::from_vec(values, (3, 7), &Device::Cpu)?
    };
    assert_eq!(max_abs_diff(&want, &want)?, 0.0);
    assert!((max_abs_diff(&spike(2.0)?, &want)? - 2.0).abs() < 1e-6);
    assert!((rms_diff(&spike(2.0)?, &want)? - (4.0f64 / 21.0).sqrt()).abs() < 1e-6);
    let size = want.sqr()?.sum_all()?.to_scalar::<f32>()? as f64;
    assert!((nmse(&spike(2.0)?, &want)? - 4.0 / size).abs() < 1e-6);
    for distance in [max_abs_diff, rms_diff, nmse] {
        assert!(distance(&spike(f32::NAN)?, &want)?.is_nan());
        assert!(distance(&want.narrow(1, 0, 1)?, &want).is_err());
    }
    Ok(())
}

#[test]
fn random_tensors_are_unit_normal_and_follow_their_seed() -> Result<()> {
    let x = normal(7, (100, 1000), DType::F32)?;
    assert_eq!(max_abs_diff(&x, &normal(7, (100, 1000), DType::F32)?)?, 0.0);
    assert!(max_abs_diff(&x, &normal(8, (100, 1000), DType::F32)?)? > 1.0);
    let mean = x.mean_all()?.to_scalar::<f32>()?;
    let variance = x.sqr()?.mean_all()?.to_scalar::<f32>()?;
    assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02);
    Ok(())
}
