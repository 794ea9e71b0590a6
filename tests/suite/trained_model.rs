//! The trained model of the repository: what transformers makes of it, and the secret words that only attention over the
//! whole context can find.

use crate::common::model::paths;
use crate::common::trained_model;
use crate::gguf_support::made;
use candle::quantized::GgmlDType;
use candle::{DType, Device, Tensor};
use gem::models::gemma4::{
    generate, AttentionPath, Cache, Config, Finish, Model, StopTokens, Weights,
};
use rand::{seq::IndexedRandom, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use tokenizers::Tokenizer;

#[derive(Deserialize)]
struct Golden {
    kind: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    top10_ids: Vec<usize>,
    top10_logits: Vec<f32>,
}

struct Trained {
    model: Model,
    stop: StopTokens,
}

fn load(dtype: DType) -> Trained {
    let folder = trained_model();
    let config = Config::from_file(folder.join("config.json")).unwrap();
    let weights = Weights::open_dir(&folder).unwrap();
    weights.check(&config.tensor_shapes()).unwrap();
    let generation = std::fs::read_to_string(folder.join("generation_config.json")).unwrap();
    let stop = StopTokens::new(&config, Some(&generation)).unwrap();
    Trained {
        model: Model::new(&config, weights.var_builder(dtype, &Device::Cpu)).unwrap(),
        stop,
    }
}

impl Trained {
    fn prefill(&self, path: AttentionPath, prompt: &[u32], chunk: usize) -> (Tensor, Cache) {
        let mut cache = self.model.new_cache(path).unwrap();
        let input = Tensor::new(prompt, &Device::Cpu)
            .unwrap()
            .unsqueeze(0)
            .unwrap();
        let logits = self.model.prefill(&input, chunk, &mut cache).unwrap();
        assert_eq!(cache.len(), prompt.len());
        (logits.squeeze(0).unwrap(), cache)
    }

    /// At most `max_new` greedy tokens, and the stop token if one ended them.
    fn answer(&self, logits: Tensor, mut cache: Cache, max_new: usize) -> Vec<u32> {
        let (mut ids, room) = (vec![], cache.max_context() - cache.len());
        let finish = generate(
            logits,
            max_new,
            room,
            &self.stop,
            |logits| logits.argmax(0)?.to_scalar(),
            |id| {
                ids.push(id);
                Ok(())
            },
            |id| {
                self.model
                    .forward(&Tensor::new(&[[id]], &Device::Cpu)?, &mut cache)?
                    .squeeze(0)
            },
        );
        if let Finish::Stop(id) = finish.unwrap() {
            ids.push(id);
        }
        ids
    }
}

/// A chat turn of exactly `length` tokens that hides three words at `depth`, and the answer; as the model was trained.
fn secret(tokenizer: &Tokenizer, length: usize, depth: f64, seed: u64) -> (Vec<u32>, Vec<u32>) {
    let encode = |text: &str| tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    let mut words: Vec<_> = tokenizer
        .get_vocab(false)
        .into_iter()
        .filter_map(|(word, id)| Some((id, word.strip_prefix('▁')?.to_string())))
        .filter(|(id, word)| {
            *id > 300 && word.len() > 3 && word.chars().all(|c| c.is_ascii_lowercase())
        })
        .collect();
    words.sort_unstable();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let chosen: Vec<_> = words
        .choose_multiple(&mut rng, 3)
        .map(|(_, word)| word.clone())
        .collect();
    let (a, b, c) = (&chosen[0], &chosen[1], &chosen[2]);
    let head = encode("<bos><|turn>user\n");
    let needle = encode(&format!(
        " The secret words are {a}, {b} and {c}. Remember them."
    ));
    let ask = encode("\nWhat are the secret words?<turn|>\n<|turn>model\n");
    let answer = encode(&format!("The secret words are {a}, {b} and {c}.<turn|>"));
    // The last 1.5 % of the stories were not trained on.
    let stories = std::fs::read_to_string(trained_model().join("stories.txt")).unwrap();
    let held_out: String = stories
        .chars()
        .skip(stories.chars().count() * 985 / 1000)
        .collect();
    let filler = encode(&held_out);
    let room = length - head.len() - needle.len() - ask.len();
    assert!(
        filler.len() >= room,
        "{} tokens of held-out text, {room} needed",
        filler.len()
    );
    let (before, after) = filler[..room].split_at((room as f64 * depth) as usize);
    let prompt = [&head, before, &needle, after, &ask].concat();
    assert_eq!(prompt.len(), length);
    (prompt, answer)
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(trained_model().join("tokenizer.json")).unwrap()
}

/// Every path gives the right answer, and so the same tokens.
fn assert_secret_is_found(trained: &Trained, length: usize, chunk: usize, depth: f64) {
    assert_secret_is_found_by(&paths(&trained.model), trained, length, chunk, depth);
}

fn assert_secret_is_found_by(
    paths: &[AttentionPath],
    trained: &Trained,
    length: usize,
    chunk: usize,
    depth: f64,
) {
    let tokenizer = tokenizer();
    let (prompt, want) = secret(&tokenizer, length, depth, length as u64);
    for &path in paths {
        let (logits, cache) = trained.prefill(path, &prompt, chunk);
        let got = trained.answer(logits, cache, want.len());
        let text = tokenizer.decode(&got, false).unwrap();
        assert_eq!(
            got, want,
            "{length} tokens, depth {depth}, chunks of {chunk}, {path}: {text}"
        );
    }
}

#[test]
fn f32_greedy_tokens_are_those_of_transformers() {
    let trained = load(DType::F32);
    let goldens = std::fs::read_to_string(trained_model().join("golden.json")).unwrap();
    let goldens: Vec<Golden> = serde_json::from_str(&goldens).unwrap();
    assert_eq!(goldens.iter().filter(|g| g.kind == "secret").count(), 4);
    for (i, golden) in goldens.iter().enumerate() {
        for path in paths(&trained.model) {
            let (logits, cache) = trained.prefill(path, &golden.prompt_ids, 1024);
            let row = logits.to_vec1::<f32>().unwrap();
            for (&id, &want) in golden.top10_ids.iter().zip(&golden.top10_logits) {
                assert!(
                    (row[id] - want).abs() <= 1e-3,
                    "golden {i}, {path}: logit {id} is {}, want {want}",
                    row[id]
                );
            }
            let got = trained.answer(logits, cache, golden.greedy_ids.len());
            assert_eq!(got, golden.greedy_ids, "golden {i}, {path}");
        }
    }
}

#[test]
fn the_secret_is_found_at_every_chunking() {
    let trained = load(DType::F32);
    for (chunk, depth) in [(1, 0.1), (7, 0.9), (256, 0.3), (1024, 0.6)] {
        assert_secret_is_found(&trained, 512, chunk, depth);
    }
}

#[test]
fn the_secret_is_found_in_half_precision() {
    for dtype in [DType::BF16, DType::F16] {
        assert_secret_is_found(&load(dtype), 700, 256, 0.2);
    }
}

#[test]
fn the_secret_is_found_far_outside_the_window() {
    assert_secret_is_found(&load(DType::F32), 3000, 512, 0.1);
}

/// `cargo test --release -- --ignored --nocapture the_secret_is_found_up_to_16384_tokens`
#[test]
#[ignore = "takes up to an hour on two cores"]
fn the_secret_is_found_up_to_16384_tokens() {
    let trained = load(DType::F32);
    for length in [512, 1024, 2048, 4096, 8192, 16_384] {
        for (chunk, depth) in [
            (1, 0.1),
            (7, 0.3),
            (256, 0.5),
            (1024, 0.7),
            (usize::MAX, 0.9),
        ] {
            assert_secret_is_found(&trained, length, chunk.min(length), depth);
            println!(
                "{length} tokens in chunks of {}: found by every path",
                chunk.min(length)
            );
        }
    }
}

/// `cargo test --release -- --ignored --nocapture the_secret_is_found_in_values_alone`
#[test]
#[ignore = "takes minutes"]
fn the_secret_is_found_in_values_alone_up_to_16384_tokens() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let trained = load(dtype);
        for (length, chunk, depth) in [
            (2048, 1, 0.1),
            (4096, 256, 0.3),
            (8192, 1024, 0.5),
            (16_384, 512, 0.7),
            (16_384, 16_384, 0.2),
        ] {
            let path = AttentionPath::FusedSharedKv;
            assert_secret_is_found_by(&[path], &trained, length, chunk, depth);
            println!("{dtype:?}, {length} tokens in chunks of {chunk}: found by {path}");
        }
    }
}

/// Whether this path says the three words of an 8,192-token prompt.
fn finds_the_secret(trained: &Trained, path: AttentionPath, seed: u64) -> bool {
    let (prompt, want) = secret(&tokenizer(), 8192, 0.4, seed);
    let (logits, cache) = trained.prefill(path, &prompt, 1024);
    trained.answer(logits, cache, want.len()) == want
}

/// `cargo test --release -- --ignored --nocapture the_secret_is_found_in_quantized_weights`
#[test]
#[ignore = "takes minutes"]
fn the_secret_is_found_in_quantized_weights_at_8192_tokens() {
    for (stored, least) in [
        (GgmlDType::Q8_0, 4),
        (GgmlDType::Q6K, 4),
        (GgmlDType::Q4_0, 0),
    ] {
        let (_file, gguf) = made(&trained_model(), stored);
        let trained = Trained {
            model: Model::from_gguf(&gguf, DType::F32, &Device::Cpu).unwrap(),
            ..load(DType::F32)
        };
        for path in paths(&trained.model) {
            let found = (0..4)
                .filter(|&seed| finds_the_secret(&trained, path, seed))
                .count();
            println!("{stored:?}, {path}: {found} of 4 found");
            assert!(found >= least, "{stored:?}, {path}: {found} of 4 found");
        }
    }
}
