//! A text begins with one BOS and ends at the first stop token, whatever file declares it.

use crate::common::message;
use candle::{DType, Device, Tensor};
use gem::models::gemma4::{generate, soft_cap, with_one_bos, Config, Finish, StopTokens};

const VOCAB: usize = 128;

/// A model that says `script`, token by token; returns the answer, how it ended, and how often the model ran.
fn run(
    script: &[u32],
    max_new: usize,
    room: usize,
    stop: &StopTokens,
) -> (Vec<u32>, Finish, usize) {
    let logits = |at: usize| {
        let mut row = vec![0f32; VOCAB];
        row[script[at] as usize] = 9.0;
        Tensor::from_vec(row, VOCAB, &Device::Cpu).unwrap()
    };
    let (mut answer, mut fed) = (vec![], 0);
    let sample = |logits: &Tensor| logits.argmax(0)?.to_scalar::<u32>();
    let finish = generate(
        logits(0),
        max_new,
        room,
        stop,
        sample,
        |id| {
            answer.push(id);
            Ok(())
        },
        |id| {
            assert_eq!(id, script[fed]);
            fed += 1;
            Ok(logits(fed))
        },
    )
    .unwrap();
    (answer, finish, fed)
}

fn config(eos: serde_json::Value) -> Config {
    let mut config = serde_json::json!({
        "model_type": "gemma4_text", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2,
        "num_key_value_heads": 1, "sliding_window": 4, "max_position_embeddings": 64, "vocab_size": 128,
        "hidden_size_per_layer_input": 0,
    });
    config["eos_token_id"] = eos;
    Config::from_json(&config.to_string()).unwrap()
}

/// waybarrios/vllm-mlx#610: stopping on one EOS only prints the turn marker and runs on.
#[test]
fn any_declared_stop_token_ends_the_answer_without_another_forward_pass() {
    let stop = StopTokens::new(
        &config(serde_json::json!([1, 106])),
        Some(r#"{"eos_token_id": [1, 106, 50]}"#),
    )
    .unwrap();
    for end in [1, 50, 106] {
        let (answer, finish, fed) = run(&[10, 11, end, 12, 13], 100, 100, &stop);
        assert_eq!(
            (answer.as_slice(), finish, fed),
            ([10, 11].as_slice(), Finish::Stop(end), 2)
        );
    }
    // 107 is a newline.
    let (answer, finish, _) = run(&[10, 107, 11, 1], 100, 100, &stop);
    assert_eq!(
        (answer.as_slice(), finish),
        ([10, 107, 11].as_slice(), Finish::Stop(1))
    );
}

#[test]
fn stop_tokens_are_the_union_of_what_the_files_declare() {
    let json = serde_json::json!([1, 106]);
    let stop = |eos: serde_json::Value, generation: Option<&str>| {
        StopTokens::new(&config(eos), generation).unwrap()
    };
    assert_eq!(stop(1.into(), None).ids(), [1]);
    assert_eq!(stop(json, None).ids(), [1, 106]);
    assert_eq!(
        stop(serde_json::Value::Null, Some(r#"{"eos_token_id": 50}"#)).ids(),
        [50]
    );
    assert_eq!(
        stop(1.into(), Some(r#"{"eos_token_id": [106, 1]}"#)).ids(),
        [1, 106]
    );
    assert_eq!(stop(1.into(), Some("{}")).ids(), [1]);
    // Files that declare none still stop a chat at the end of the turn.
    let chat = stop(serde_json::Value::Null, None).with(106);
    assert_eq!(run(&[10, 106, 11], 9, 9, &chat).1, Finish::Stop(106));
    let bad = StopTokens::new(&config(1.into()), Some(r#"{"eos_token_id": "<eos>"}"#)).unwrap_err();
    insta::assert_snapshot!(message(bad), @r#"gemma4 config: `eos_token_id` is "<eos>": invalid type: string "<eos>", expected u32"#);
}

#[test]
fn the_length_and_the_context_end_an_answer_and_say_so() {
    let stop = StopTokens::new(&config(1.into()), None).unwrap();
    assert_eq!(
        run(&[10, 11, 12, 13], 2, 100, &stop),
        (vec![10, 11], Finish::Length, 1)
    );
    assert_eq!(
        run(&[10, 11, 12, 13], 100, 2, &stop),
        (vec![10, 11, 12], Finish::ContextFull, 2)
    );
    assert_eq!(run(&[10], 0, 100, &stop), (vec![], Finish::Length, 0));
}

/// ggml-org/llama.cpp#21500: no BOS gives worse text, and a template may bring its own.
#[test]
fn a_prompt_begins_with_exactly_one_bos() {
    assert_eq!(with_one_bos(&[10, 11], 2), [2, 10, 11]);
    assert_eq!(with_one_bos(&[2, 10, 11], 2), [2, 10, 11]);
    assert_eq!(with_one_bos(&[2, 2, 10], 2), [2, 10]);
    assert_eq!(with_one_bos(&[], 2), [2]);
}

fn capped(values: &[f32], cap: Option<f64>) -> Vec<f32> {
    let logits = Tensor::new(values, &Device::Cpu).unwrap();
    soft_cap(&logits, cap).unwrap().to_vec1().unwrap()
}

/// unslothai/unsloth-zoo#593: `x * tanh(x / cap)` does nothing above 2 cap and turns negative logits positive.
#[test]
fn the_soft_cap_is_cap_times_tanh() {
    let got = capped(&[5.0, 30.0, 124.0, -45.0, 1e4], Some(30.0));
    for (got, want) in got
        .iter()
        .zip([4.9542f32, 22.8478, 29.9846, -27.1545, 30.0])
    {
        assert!((got - want).abs() < 1e-4, "{got}, want {want}");
    }
    assert_eq!(capped(&[124.0, -45.0], None), [124.0, -45.0]);
    let ascending: Vec<f32> = (-1000..=1000).map(|x| x as f32 / 10.0).collect();
    let capped_once = capped(&ascending, Some(30.0));
    assert!(
        capped_once.windows(2).all(|w| w[0] < w[1]),
        "order is kept for distinct inputs up to 100"
    );
    assert!(capped_once.iter().all(|x| x.abs() <= 30.0));
    assert_ne!(capped(&capped_once, Some(30.0)), capped_once);
}

/// An infinity that became the cap would pass for the likeliest token, or for one that is never said.
#[test]
fn the_soft_cap_makes_no_number_of_an_infinity_and_keeps_the_bits_of_numbers() {
    let infinite = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let logits = Tensor::new(&infinite, &Device::Cpu).unwrap();
        let capped = soft_cap(&logits.to_dtype(dtype).unwrap(), Some(30.0)).unwrap();
        let capped: Vec<f32> = capped.to_dtype(DType::F32).unwrap().to_vec1().unwrap();
        assert!(capped.iter().all(|x| x.is_nan()), "{dtype:?}: {capped:?}");
    }
    assert_eq!(capped(&infinite[..2], None), infinite[..2]);
    let numbers = [
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        0.1,
        -7.3,
        29.0,
        -1e3,
        3e38,
        f32::MIN,
    ];
    let logits = Tensor::new(&numbers, &Device::Cpu).unwrap();
    let plain = ((logits / 30.0).unwrap().tanh().unwrap() * 30.0).unwrap();
    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(
        bits(capped(&numbers, Some(30.0))),
        bits(plain.to_vec1().unwrap())
    );
}

#[test]
fn logits_that_are_not_finite_are_an_error_before_sampling() {
    let stop = StopTokens::new(&config(1.into()), None).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let logits = Tensor::new(&[0.0, 1.0, bad], &Device::Cpu).unwrap();
        let error = generate(
            logits,
            5,
            5,
            &stop,
            |_| panic!("sampled"),
            |_| Ok(()),
            |_| panic!("fed"),
        )
        .unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with(&format!("gemma4: the logit of token 2 is {bad}")),
            "{error}"
        );
    }
}
