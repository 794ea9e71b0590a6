//! What turns logits into a text that begins and ends in the right place; tokenizer and sampler are the caller's.

use super::config::Config;
use super::json::{self, Fields};
use candle::{bail, Result, Tensor};

/// The ids that end an answer: all that the checkpoint's files declare, not only the tokenizer's one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopTokens(Vec<u32>);

impl StopTokens {
    /// `generation_config` is the text of the checkpoint's `generation_config.json`, if it has one.
    pub fn new(config: &Config, generation_config: Option<&str>) -> Result<Self> {
        let mut stop = Self(config.eos_token_ids.clone());
        if let Some(text) = generation_config {
            for id in Fields(&json::object(text)?).token_ids("eos_token_id")? {
                if let Err(fault) = config.check_id("eos_token_id", id) {
                    bail!("gemma4 config: {fault}");
                }
                stop = stop.with(id);
            }
        }
        Ok(stop)
    }

    /// Adds an id, such as the end of a turn in a chat.
    pub fn with(mut self, id: u32) -> Self {
        if !self.contains(id) {
            self.0.push(id);
        }
        self
    }

    /// Whether `id` ends an answer.
    pub fn contains(&self, id: u32) -> bool {
        self.0.contains(&id)
    }

    /// The ids, in no particular order.
    pub fn ids(&self) -> &[u32] {
        &self.0
    }
}

/// `ids` with exactly one `bos` at the front, however many the tokenizer or the template put there.
pub fn with_one_bos(ids: &[u32], bos: u32) -> Vec<u32> {
    let rest = ids.iter().copied().skip_while(|&id| id == bos);
    std::iter::once(bos).chain(rest).collect()
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model gave this stop token, which is not part of the answer.
    Stop(u32),
    /// As many tokens as were asked for.
    Length,
    /// No room for another token.
    ContextFull,
}

impl std::fmt::Display for Finish {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Self::Stop(id) => write!(f, "stop (token {id})"),
            Self::Length => f.write_str("length"),
            Self::ContextFull => f.write_str("context full"),
        }
    }
}

/// Samples an answer token by token.
///
/// # Arguments
///
/// * `logits` - `(vocab)` after the prompt.
/// * `max_new` - Most tokens to give.
/// * `room` - How many tokens can still be fed.
/// * `sample` - Chooses a token from logits `(vocab)`.
/// * `emit` - Takes each token of the answer; a stop token is not among them.
/// * `feed` - Feeds a token and returns the logits `(vocab)` after it; not called after the last token.
///
/// # Errors
///
/// Logits that are not finite, before any is sampled; whatever the callbacks return.
pub fn generate(
    mut logits: Tensor,
    max_new: usize,
    room: usize,
    stop: &StopTokens,
    mut sample: impl FnMut(&Tensor) -> Result<u32>,
    mut emit: impl FnMut(u32) -> Result<()>,
    mut feed: impl FnMut(u32) -> Result<Tensor>,
) -> Result<Finish> {
    for given in 0..max_new {
        check_finite(&logits)?;
        let id = sample(&logits)?;
        if stop.contains(id) {
            return Ok(Finish::Stop(id));
        }
        emit(id)?;
        if given + 1 == max_new {
            break;
        }
        if given == room {
            return Ok(Finish::ContextFull);
        }
        logits = feed(id)?;
    }
    Ok(Finish::Length)
}

fn check_finite(logits: &Tensor) -> Result<()> {
    if logits.sum_all()?.to_scalar::<f32>()?.is_finite() {
        return Ok(());
    }
    let values = logits.flatten_all()?.to_vec1::<f32>()?;
    match values.iter().position(|x| !x.is_finite()) {
        Some(id) => bail!(
            "gemma4: the logit of token {id} is {}, want finite logits",
            values[id]
        ),
        None => Ok(()),
    }
}
