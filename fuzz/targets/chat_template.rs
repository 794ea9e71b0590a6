//! A chat template and what was said: an error, or a prompt in which only the template has control tokens.
//!
//! The input is texts divided by bytes 0xFF: the template, or a `tokenizer_config.json` that holds one, then the system's text,
//! then turns of user and model.
#![no_main]

#[allow(dead_code, reason = "the program uses all of it")]
#[path = "../../examples/gemma4/chat/mod.rs"]
mod chat;
#[allow(dead_code, reason = "the program uses all of it")]
#[path = "../../examples/gemma4/bounded_file.rs"]
mod bounded_file;
#[path = "../../examples/gemma4/guard.rs"]
#[allow(dead_code, reason = "the chat uses what a panic says alone")]
mod guard;
mod panics;
#[allow(dead_code, reason = "the program uses all of it")]
#[path = "../../examples/gemma4/replace.rs"]
mod replace;

use chat::{Conversation, Encoder, Form, Piece, Role, Template};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use tokenizers::Tokenizer;

const BOS: u32 = 0;

static ENCODER: LazyLock<Encoder> = LazyLock::new(|| {
    let json = include_bytes!("../seeds/tokenizer/smallest.json");
    Encoder::new(Tokenizer::from_bytes(json).unwrap())
});

fuzz_target!(init: panics::let_be_caught(), |input: &[u8]| {
    let mut texts = input
        .split(|byte| *byte == 0xff)
        .map(|text| String::from_utf8_lossy(text).into_owned());
    let source = texts.next().unwrap_or_default();
    let system = texts.next().filter(|text| !text.is_empty());
    let mut conversation = Conversation {
        think: source.len() % 2 == 1,
        system,
        ..Default::default()
    };
    for (role, text) in [Role::User, Role::Model].into_iter().cycle().zip(texts) {
        conversation.push(role, &text);
    }
    let Some(template) = read(source) else {
        return;
    };
    let form = Form { template, bos: BOS };
    let Ok(pieces) = form.template.render(&conversation, Some("<bos>")) else {
        return;
    };
    let said = pieces.into_iter().filter(|piece| match piece {
        Piece::Template(_) => false,
        Piece::Content(text) => {
            let system = conversation.system.iter().map(|text| text.trim());
            let turns = conversation.turns.iter().map(|turn| turn.content.as_str());
            assert!(system.chain(turns).any(|said| said == text), "{text:?}");
            true
        }
    });
    let ids = ENCODER.encode(&said.collect::<Vec<_>>(), BOS).unwrap();
    let controls = ENCODER.tokenizer().get_added_tokens_decoder();
    let control = ids[1..]
        .iter()
        .find(|id| controls.get(id).is_some_and(|t| t.special));
    assert_eq!(control, None, "from what was said");
    let prompt = form.prompt(&conversation, &ENCODER).unwrap();
    assert!(prompt[0] == BOS && prompt.get(1) != Some(&BOS));
    let _ = form.lasting(&conversation, &prompt, &ENCODER);
    let _ = form.end_of_turn(&ENCODER);
});

fn read(source: String) -> Option<Template> {
    if !source.starts_with("{\"") {
        return Template::new(source, "here".into()).ok();
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), source).unwrap();
    Template::of_checkpoint(folder.path()).ok().flatten()
}
