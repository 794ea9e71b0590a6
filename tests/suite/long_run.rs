//! A process that goes on for long: its memory and its answers.

use crate::common::{live, trained_model};
use candle::{DType, Device, Tensor};
use gem::models::gemma4::{AttentionPath, Cache, Config, Model, Weights};
use std::ops::Range;
use std::time::Instant;

/// Tokens of an answer in a long run; so many in a row, whatever the model would stop at.
const ANSWER: usize = 500;
/// Lengths of prompts, again and again.
const LENGTHS: usize = 5;
/// Bytes by which what is held after one turn of all lengths may pass what was held after another: the queues of the threads grow
/// and shrink in blocks.
const MARGIN: usize = 16 << 10;
const CHILD: &str = "long_run::rounds_in_a_process_of_their_own";

fn model() -> Model {
    let config = Config::from_file(trained_model().join("config.json")).unwrap();
    let weights = Weights::open_dir(trained_model()).unwrap();
    Model::new(&config, weights.var_builder(DType::F32, &Device::Cpu)).unwrap()
}

/// A prompt of 40 to 760 tokens, so that caches shrink and grow and the window of 256 is passed
/// or not.
fn prompt(round: usize) -> Vec<u32> {
    let len = 40 + round * 2 % LENGTHS * 180;
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

/// Answers to prompts, all in one cache: the tokens of the last, and what is held after each.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Rounds {
    last: Vec<u32>,
    allocated: Vec<usize>,
    resident_kib: Vec<usize>,
}

/// Prints them.
#[test]
#[ignore = "run by the other tests"]
fn rounds_in_a_process_of_their_own() {
    let Ok(wanted) = std::env::var("GEM_TEST_ROUNDS") else {
        return;
    };
    let (path, rounds, tokens): (String, Range<usize>, usize) =
        serde_json::from_str(&wanted).unwrap();
    let model = model();
    let mut cache = model.new_cache(path.parse().unwrap()).unwrap();
    let mut done = Rounds {
        last: vec![],
        allocated: Vec::with_capacity(rounds.len()),
        resident_kib: Vec::with_capacity(rounds.len()),
    };
    for round in rounds {
        done.last = answered(&model, &mut cache, round, tokens);
        done.allocated.push(live::allocated());
        done.resident_kib.push(live::resident_kib());
    }
    println!("rounds {}", serde_json::to_string(&done).unwrap());
}

fn of_a_fresh_process(path: AttentionPath, rounds: Range<usize>, tokens: usize) -> Rounds {
    let wanted = serde_json::to_string(&(path.to_string(), rounds, tokens)).unwrap();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", CHILD, "--ignored", "--nocapture"])
        .env("GEM_TEST_ROUNDS", wanted)
        // Their queues would hold more or less at random.
        .env("RAYON_NUM_THREADS", "1")
        .envs([live::EXACT])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let rounds = text.lines().find_map(|line| line.split("rounds ").nth(1));
    serde_json::from_str(rounds.unwrap_or_else(|| panic!("{text}"))).unwrap()
}

/// Nothing more is held after the last turn of all lengths than after the second, and the last answer is that of a fresh process.
fn assert_memory_and_answers_stay(path: AttentionPath, rounds: usize, tokens: usize) {
    let start = Instant::now();
    let long = of_a_fresh_process(path, 0..rounds, tokens);
    let turns: Vec<_> = long.allocated.chunks_exact(LENGTHS).collect();
    println!(
        "{path}: {} tokens in {:.0} s; allocated after a prompt of the first length: {:?} bytes; resident: {:?}, {} KiB at most",
        rounds * tokens,
        start.elapsed().as_secs_f64(),
        turns.iter().map(|turn| turn[0]).collect::<Vec<_>>(),
        long.resident_kib.chunks_exact(LENGTHS).map(|turn| turn[0]).collect::<Vec<_>>(),
        long.resident_kib.iter().max().unwrap()
    );
    for (second, last) in turns[1].iter().zip(turns[turns.len() - 1]) {
        assert!(*last <= second + MARGIN, "{path}: {turns:?} bytes");
    }
    let fresh = of_a_fresh_process(path, rounds - 1..rounds, tokens);
    assert_eq!(long.last.len(), tokens);
    assert_eq!(long.last, fresh.last, "{path}");
}

/// `cargo test --release --test suite -- --ignored --nocapture --test-threads 1 long_run_of_20000`
#[test]
#[ignore = "takes minutes"]
fn a_long_run_of_20000_tokens_on_the_fused_path() {
    assert_memory_and_answers_stay(AttentionPath::Fused, 20_000 / ANSWER, ANSWER);
}

#[test]
#[ignore = "takes minutes"]
fn a_long_run_of_20000_tokens_on_values_alone() {
    assert_memory_and_answers_stay(AttentionPath::FusedSharedKv, 20_000 / ANSWER, ANSWER);
}

#[test]
#[ignore = "takes minutes"]
fn a_long_run_of_20000_tokens_on_plain_ops() {
    assert_memory_and_answers_stay(AttentionPath::Reference, 20_000 / ANSWER, ANSWER);
}

#[test]
fn after_other_conversations_a_cache_says_what_a_fresh_process_says_and_holds_no_more() {
    assert_memory_and_answers_stay(AttentionPath::Fused, 3 * LENGTHS, 20);
}
