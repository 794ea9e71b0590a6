//! The example prints text as tokens come, whole characters only, and all of it.

use crate::common::trained_model;
use crate::example_stream::{AnswerStream, TextStream};
use tokenizers::{AddedToken, Tokenizer};

/// What is on the screen after each token, and the text that is returned.
fn streamed(ids: &[u32]) -> (Vec<String>, String) {
    let tokenizer = Tokenizer::from_file(trained_model().join("tokenizer.json")).unwrap();
    let mut screen = vec![];
    let mut seen = vec![];
    let mut stream = TextStream::new(&tokenizer, &mut screen);
    for &id in ids {
        stream.push(id).unwrap();
    }
    let text = stream.finish().unwrap();
    for n in 1..=ids.len() {
        let mut screen = vec![];
        let mut stream = TextStream::new(&tokenizer, &mut screen);
        ids[..n].iter().for_each(|&id| stream.push(id).unwrap());
        drop(stream);
        seen.push(String::from_utf8(screen).unwrap());
    }
    assert_eq!(String::from_utf8(screen).unwrap(), format!("{text}\n"));
    (seen, text)
}

fn ids(text: &str) -> Vec<u32> {
    let tokenizer = Tokenizer::from_file(trained_model().join("tokenizer.json")).unwrap();
    tokenizer.encode(text, false).unwrap().get_ids().to_vec()
}

#[test]
fn a_character_of_several_tokens_appears_when_it_is_complete() {
    // Not in the vocabulary, so it is spelt in bytes.
    let snowman = ids("☃");
    assert_eq!(snowman.len(), 3);
    let (seen, text) = streamed(&[ids("Once upon"), snowman, ids(" a time")].concat());
    assert_eq!(text, "Once upon☃ a time");
    assert!(
        seen.iter().all(|screen| !screen.contains('\u{fffd}')),
        "{seen:?}"
    );
    assert!(seen.windows(2).all(|w| w[1].starts_with(&w[0])), "{seen:?}");
}

#[test]
fn an_answer_that_ends_inside_a_character_still_ends_with_what_there_is() {
    let (_, text) = streamed(&[ids("Once"), ids("☃")[..2].to_vec()].concat());
    assert!(text.starts_with("Once"), "{text}");
    assert!(text.contains('\u{fffd}'), "{text}");
}

#[test]
fn thoughts_are_not_part_of_an_answer() {
    let mut tokenizer = Tokenizer::from_file(trained_model().join("tokenizer.json")).unwrap();
    let controls = ["<|channel>", "<channel|>"].map(|token| AddedToken::from(token, true));
    assert_eq!(tokenizer.add_special_tokens(controls).unwrap(), 2);
    let ids = |text: &str| tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    for (said, want) in [
        ("Once upon", "Once upon"),
        ("<|channel>thought\nOnce ☃<channel|>a time", "a time"),
        ("One <|channel>two<channel|>three", "One three"),
        ("<|channel>never closed", ""),
        ("a <channel|>b", "a b"),
    ] {
        let mut screen = vec![];
        let mut stream = AnswerStream::new(&tokenizer, &mut screen, false);
        ids(said).iter().for_each(|&id| stream.push(id).unwrap());
        let text = stream.finish().unwrap();
        assert_eq!(text.trim(), want, "{said}");
        assert_eq!(String::from_utf8(screen).unwrap(), format!("{text}\n"));
    }
}
