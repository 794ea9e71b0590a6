//! How a prompt becomes tokens that begin with exactly one BOS.

use anyhow::{anyhow, Result};
use gem::models::gemma4::with_one_bos;
use tokenizers::Tokenizer;

const TURN: &str = "<|turn>";
const END_OF_TURN: &str = "<turn|>";

pub enum Prompt {
    /// Text to continue; control tokens in it count.
    Raw(String),
    /// The content of a user turn; control tokens in it are plain text.
    User(String),
}

impl Prompt {
    pub fn encode(&self, tokenizer: &mut Tokenizer, bos: u32) -> Result<Vec<u32>> {
        match self {
            Self::Raw(text) => Ok(with_one_bos(&encode(tokenizer, text)?, bos)),
            Self::User(content) => {
                tokenizer.set_encode_special_tokens(true);
                let ids = user_turn(tokenizer, content.trim(), bos);
                tokenizer.set_encode_special_tokens(false);
                ids
            }
        }
    }

    /// The token that ends an answer to this prompt besides those that the checkpoint declares.
    pub fn stop(&self, tokenizer: &Tokenizer) -> Option<u32> {
        match self {
            Self::Raw(_) => None,
            Self::User(_) => tokenizer.token_to_id(END_OF_TURN),
        }
    }
}

/// A user turn and the beginning of the model's, as Gemma 4's chat template writes them.
fn user_turn(tokenizer: &Tokenizer, content: &str, bos: u32) -> Result<Vec<u32>> {
    let (turn, end_of_turn) = (control(tokenizer, TURN)?, control(tokenizer, END_OF_TURN)?);
    let mut ids = vec![bos, turn];
    ids.extend(encode(tokenizer, &format!("user\n{content}"))?);
    ids.push(end_of_turn);
    ids.extend(encode(tokenizer, "\n")?);
    ids.push(turn);
    ids.extend(encode(tokenizer, "model\n")?);
    Ok(ids)
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = tokenizer
        .encode(text, false)
        .map_err(|e| anyhow!("the prompt: {e}"))?;
    Ok(encoding.get_ids().to_vec())
}

fn control(tokenizer: &Tokenizer, token: &str) -> Result<u32> {
    tokenizer
        .token_to_id(token)
        .ok_or_else(|| anyhow!("the tokenizer has no {token}, want one of a Gemma 4 for a chat"))
}
