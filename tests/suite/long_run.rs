//! A process that goes on for long: its memory and its answers.

use crate::common::trained_model;
use candle::{DType, Device, Tensor};
use gem::models::gemma4::{AttentionPath, Cache, Config, Model, Weights};
use std::time::Instant;

/// Tokens of an answer in a long run; so many in a row, whatever the model would stop at.
const ANSWER: usize = 500;
/// KiB by which the mean of the last rounds may pass that of the second quarter: 100 bytes for each of the 10,000 tokens between.
#[cfg(target_os = "linux")]
const MARGIN: usize = 1024;
const CHILD: &str = "long_run::one_round_in_a_process_of_its_own";

fn model() -> Model {
    let config = Config::from_file(trained_model().join("config.json")).unwrap();
    let weights = Weights::open_dir(trained_model()).unwrap();
    Model::new(&config, weights.var_builder(DType::F32, &Device::Cpu)).unwrap()
}

/// A prompt of 40 to 760 tokens, five lengths again and again, so that caches shrink and grow and the window of 256 is passed
/// or not.
fn prompt(round: usize) -> Vec<u32> {
    let len = 40 + round * 2 % 5 * 180;
    let id = |i| 300 + (i * 7919 + round * 104_729) % 3000;
    [2].into_iter()
        .chain((1..len).map(|i| id(i) as u32))
        .collect()
}

fn answered(model: &Model, cache: &mut Cache, round: usize, tokens: usize) -> Vec<u32> {
    let input = |ids: &[u32]| {
        Tensor::new(ids, &Device::Cpu)
            .unwrap()
            .unsqueeze(0)
            .unwrap()
    };
    cache.clear();
    let mut logits = model.prefill(&input(&prompt(round)), 256, cache).unwrap();
    let mut answer = vec![];
    for _ in 0..tokens {
        let next = logits.squeeze(0).unwrap().argmax(0).unwrap();
        answer.push(next.to_scalar::<u32>().unwrap());
        logits = model
            .forward(&input(&answer[answer.len() - 1..]), cache)
            .unwrap();
    }
    answer
}

fn path() -> AttentionPath {
    let wanted = std::env::var("GEM_TEST_PATH").unwrap_or("fused".into());
    wanted.parse().unwrap()
}

/// Prints the tokens of one round.
#[test]
#[ignore = "run by the long runs"]
fn one_round_in_a_process_of_its_own() {
    let number = |name| std::env::var(name).map_or(1, |n| n.parse().unwrap());
    let (round, tokens) = (number("GEM_TEST_ROUND"), number("GEM_TEST_TOKENS"));
    let model = model();
    let mut cache = model.new_cache(path()).unwrap();
    println!("tokens {:?}", answered(&model, &mut cache, round, tokens));
}

fn of_a_fresh_process(path: AttentionPath, round: usize, tokens: usize) -> String {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", CHILD, "--ignored", "--nocapture"])
        .env("GEM_TEST_PATH", path.to_string())
        .env("GEM_TEST_ROUND", round.to_string())
        .env("GEM_TEST_TOKENS", tokens.to_string())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let tokens = text.lines().find_map(|line| line.split("tokens ").nth(1));
    tokens.unwrap_or_else(|| panic!("{text}")).to_string()
}

#[cfg(target_os = "linux")]
fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.unwrap().parse().unwrap()
}

/// Answers to one prompt after another, all in one cache; the last of them again in a fresh process.
#[cfg(target_os = "linux")]
fn assert_memory_and_answers_stay(path: AttentionPath, rounds: usize) {
    let model = model();
    let mut cache = model.new_cache(path).unwrap();
    let (start, mut last, mut held) = (Instant::now(), vec![], vec![]);
    for round in 0..rounds {
        last = answered(&model, &mut cache, round, ANSWER);
        held.push(resident_kib());
    }
    // Whole turns of the five lengths.
    let means = held.chunks(rounds / 4);
    let means: Vec<_> = means.map(|q| q.iter().sum::<usize>() / q.len()).collect();
    println!(
        "{path}: {} tokens in {:.0} s, {means:?} KiB in the quarters of {rounds} rounds, {} KiB at most",
        rounds * ANSWER,
        start.elapsed().as_secs_f64(),
        held.iter().max().unwrap()
    );
    assert!(means[3] <= means[1] + MARGIN, "{path}: {held:?} KiB");
    assert_eq!(
        format!("{last:?}"),
        of_a_fresh_process(path, rounds - 1, ANSWER),
        "{path}"
    );
}

/// `cargo test --release --test suite -- --ignored --nocapture --test-threads 1 long_run_of_20000`
#[test]
#[ignore = "takes minutes"]
#[cfg(target_os = "linux")]
fn a_long_run_of_20000_tokens_on_the_fused_path() {
    assert_memory_and_answers_stay(AttentionPath::Fused, 20_000 / ANSWER);
}

#[test]
#[ignore = "takes minutes"]
#[cfg(target_os = "linux")]
fn a_long_run_of_20000_tokens_on_values_alone() {
    assert_memory_and_answers_stay(AttentionPath::FusedSharedKv, 20_000 / ANSWER);
}

#[test]
#[ignore = "takes minutes"]
#[cfg(target_os = "linux")]
fn a_long_run_of_20000_tokens_on_plain_ops() {
    assert_memory_and_answers_stay(AttentionPath::Reference, 20_000 / ANSWER);
}

#[test]
fn after_other_conversations_a_cache_says_what_a_fresh_process_says() {
    let (model, path, tokens) = (model(), AttentionPath::Fused, 40);
    let mut cache = model.new_cache(path).unwrap();
    let rounds = (0..4).map(|round| answered(&model, &mut cache, round, tokens));
    let last = rounds.last().unwrap();
    assert_eq!(last.len(), tokens);
    assert_eq!(format!("{last:?}"), of_a_fresh_process(path, 3, tokens));
}
