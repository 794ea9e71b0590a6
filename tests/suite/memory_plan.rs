//! What [`MemoryPlan`] says, of the published shape and of a run.

use crate::common::{example, trained_model};
use candle::{DType, Device, Tensor};
use gem::models::gemma4::{AttentionPath, Cache, Config, MemoryDemand, MemoryPlan, Model, Weights};
use std::process::{Command, Output};

fn trained() -> Config {
    Config::from_file(trained_model().join("config.json")).unwrap()
}

fn demand(path: AttentionPath, context: usize) -> MemoryDemand {
    MemoryDemand {
        path,
        dtype: DType::F32,
        on_cpu: true,
        context,
        chunk: 512,
        weight_bytes: None,
        marks: false,
    }
}

#[test]
fn the_largest_context_fits_and_the_next_does_not() {
    let config = trained();
    for path in [AttentionPath::Reference, AttentionPath::Fused] {
        let total = |n| MemoryPlan::new(&config, &demand(path, n)).total();
        for limit in [total(1), total(5000), total(5000) + 1, total(60_000)] {
            let most = MemoryPlan::largest_context(&config, &demand(path, 1), limit).unwrap();
            assert!(total(most) <= limit && limit < total(most + 1), "{most}");
        }
        let none = MemoryPlan::largest_context(&config, &demand(path, 1), total(1) - 1);
        assert_eq!(none, None);
        let all = MemoryPlan::largest_context(&config, &demand(path, 1), u64::MAX);
        assert_eq!(all, Some(config.max_position_embeddings));
    }
}

#[test]
fn a_longer_context_never_takes_less() {
    let config = trained();
    for path in AttentionPath::ALL {
        let totals = (1..6000).map(|n| MemoryPlan::new(&config, &demand(path, n)).total());
        let totals: Vec<_> = totals.collect();
        assert!(totals.is_sorted(), "{path}");
    }
}

#[test]
fn weights_are_what_is_given_or_every_tensor_in_its_type() {
    let config = trained();
    let mut demand = demand(AttentionPath::Fused, 100);
    let elements: usize = config
        .tensor_shapes()
        .iter()
        .map(|(_, s)| s.iter().product::<usize>())
        .sum();
    let whole = MemoryPlan::new(&config, &demand);
    assert_eq!(whole.weights, 4 * elements as u64);
    demand.weight_bytes = Some(u64::MAX);
    assert_eq!(MemoryPlan::new(&config, &demand).total(), u64::MAX);
    assert_eq!(
        MemoryPlan::largest_context(&config, &demand, u64::MAX - 1),
        None
    );
    demand.weight_bytes = Some(12_345);
    let given = MemoryPlan::new(&config, &demand);
    assert_eq!(given.weights, 12_345);
    assert_eq!(
        MemoryPlan {
            weights: whole.weights,
            ..given
        },
        whole
    );
    let (sliding, full) = Cache::planned_bytes(&config, AttentionPath::Fused, 100, DType::F32);
    assert_eq!(
        (given.sliding_caches, given.full_caches),
        (sliding as u64, full as u64)
    );
}

/// What a conversation holds after a turn, and while it goes back.
#[test]
fn a_mark_is_planned_as_it_is_held() {
    let config = trained();
    let weights = Weights::open_dir(trained_model()).unwrap();
    let model = Model::new(&config, weights.var_builder(DType::F32, &Device::Cpu)).unwrap();
    for path in [AttentionPath::Reference, AttentionPath::FusedSharedKv] {
        // Within the window, and past it.
        for tokens in [100, 700] {
            let mut demand = demand(path, tokens);
            let without = MemoryPlan::new(&config, &demand);
            demand.marks = true;
            let plan = MemoryPlan::new(&config, &demand);
            let mut cache = model.new_cache(path).unwrap();
            cache.reserve(tokens);
            let ids = Tensor::ones((1, tokens), DType::U32, &Device::Cpu).unwrap();
            model.prefill(&ids, 512, &mut cache).unwrap();
            cache.mark().unwrap();
            let held = (plan.sliding_caches + plan.marks, plan.full_caches);
            let (sliding, full) = cache.bytes();
            assert_eq!((sliding as u64, full as u64), held, "{path} {tokens}");
            assert!(plan.marks > 0 && plan.activations >= plan.marks);
            assert_eq!(without.marks, 0);
            assert!(plan.total() >= without.total() + plan.marks);
        }
    }
}

fn gemma4(args: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(example("gemma4"));
    command.env("RUST_BACKTRACE", "0").arg("--cpu").args(args);
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.success(), text(stdout), text(stderr))
}

#[test]
fn a_run_that_cannot_fit_is_refused_before_loading_with_what_would_fit() {
    let run = [
        "--prompt",
        "Once",
        "-n",
        "1000",
        "--dtype",
        "f32",
        "--memory-limit",
    ];
    let (success, stdout, stderr) = gemma4(&[&run[..], &["0.043"]].concat());
    assert!(!success && stdout.is_empty());
    assert!(!stderr.contains("loaded"), "{stderr}");
    assert!(stderr.contains("tokens need "), "{stderr}");
    assert!(
        stderr.contains("path has room for ") && stderr.contains("--max-context "),
        "{stderr}"
    );
    assert!(stderr.contains("--dtype bf16 needs "), "{stderr}");
    let (success, _, stderr) = gemma4(&["--prompt", "Once", "-n", "2", "--memory-limit", "1"]);
    assert!(success, "{stderr}");
}

#[test]
fn the_plan_needs_no_weights() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    std::fs::copy(trained_model().join("config.json"), &config).unwrap();
    let (success, stdout, stderr) = gemma4(&["--plan", "--config-file", config.to_str().unwrap()]);
    assert!(success, "{stderr}");
    for row in ["| 8192 | reference |", "| 131072 | fused-kv |"] {
        assert!(stdout.contains(row), "{stdout}");
    }
    // Five layers of 256 tokens of 2 heads of 256, keys and values, f32.
    assert!(stdout.contains("| 5.0 MiB |"), "{stdout}");
    let (success, chat, stderr) = gemma4(&[
        "--plan",
        "--chat",
        "--config-file",
        config.to_str().unwrap(),
    ]);
    assert!(success, "{stderr}");
    assert!(chat.contains("| 10.0 MiB |"), "{chat}");
    // Not a context that the model was not made for.
    assert!(!stdout.contains("| 262144 |"), "{stdout}");
}

#[test]
fn the_peak_of_a_run_is_what_was_planned_and_the_program() {
    let peak = |attention| {
        let (success, stdout, stderr) = gemma4(&["-n", "1", "--json", "--attention", attention]);
        assert!(success, "{stderr}");
        let report: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        let plan = MemoryPlan::new(&trained(), &demand(attention.parse().unwrap(), 5905));
        report["peak_memory_bytes"]
            .as_u64()
            .map(|peak| (peak as f64, plan.total() as f64))
    };
    for attention in ["reference", "fused"] {
        // Code, tokenizer, threads and the mapped file are 60 MiB here; the rest is what the allocator keeps of what was freed.
        if let Some((peak, plan)) = peak(attention) {
            assert!(
                plan < 1.05 * peak && peak < plan + 128e6,
                "{attention}: {plan} {peak}"
            );
        }
    }
}
