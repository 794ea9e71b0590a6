//! A conversation with the model: each turn's prompt is written anew, and what the cache holds of its beginning is kept.

use crate::args::Args;
use crate::chat::{common_prefix, Conversation, Encoder, Form, Role};
use crate::interrupt;
use crate::run::{answer, out, prefill, sampler};
use crate::stream::AnswerStream;
use anyhow::{bail, Result};
use candle_transformers::generation::LogitsProcessor;
use gem::models::gemma4::{Cache, Finish, Model, StopTokens};
use std::cell::Cell;

pub struct Session<'a> {
    pub conversation: Conversation,
    model: &'a Model,
    encoder: &'a Encoder,
    form: &'a Form,
    stop: &'a StopTokens,
    args: &'a Args,
    sampler: LogitsProcessor,
    cache: Cache,
    /// The tokens that the cache holds.
    held: Vec<u32>,
}

impl<'a> Session<'a> {
    pub fn new(
        conversation: Conversation,
        model: &'a Model,
        cache: Cache,
        encoder: &'a Encoder,
        form: &'a Form,
        stop: &'a StopTokens,
        args: &'a Args,
    ) -> Self {
        Self {
            conversation,
            model,
            encoder,
            form,
            stop,
            args,
            sampler: sampler(args),
            cache,
            held: Vec::new(),
        }
    }

    /// Says `content` to the model and prints its answer.
    ///
    /// # Errors
    ///
    /// The conversation is then what it was before.
    pub fn ask(&mut self, content: &str) -> Result<()> {
        let turns = self.conversation.turns.len();
        self.conversation.push(Role::User, content);
        let answered = self.answer_turn();
        match &answered {
            Ok(Some(text)) => self.conversation.push(Role::Model, text),
            _ => self.conversation.turns.truncate(turns),
        }
        if answered.is_err() {
            // A pass may have failed half way.
            self.forget();
        }
        answered.map(drop)
    }

    fn forget(&mut self) {
        self.cache.clear();
        self.held.clear();
    }

    /// The answer to the last turn; `None` if it was interrupted before it began.
    fn answer_turn(&mut self) -> Result<Option<String>> {
        let prompt = self.form.prompt(&self.conversation, self.encoder)?;
        let limit = self.cache.max_context();
        if prompt.len() >= limit {
            bail!(
                "context full: the conversation takes {} tokens, want less than {limit}; /save FILE keeps it, /reset begins anew, a larger --max-context holds more",
                prompt.len()
            );
        }
        self.keep_prefix(&prompt)?;
        let kept = self.held.len();
        if kept > 0 && !self.args.quiet {
            say!("reused {kept} of {} tokens", prompt.len());
        }
        let lasting = self
            .form
            .lasting(&self.conversation, &prompt, self.encoder)?;
        let mut logits = None;
        if lasting > kept {
            logits = self.read(&prompt[kept..lasting])?;
        }
        if self.held.len() == lasting {
            self.cache.mark()?;
            if lasting < prompt.len() {
                logits = self.read(&prompt[lasting..])?;
            }
        } else if lasting < kept {
            logits = self.read(&prompt[kept..])?;
        }
        let Some(logits) = logits else {
            say!("interrupted while reading: the turn is dropped");
            return Ok(None);
        };
        let mut stream = AnswerStream::new(
            self.encoder.tokenizer(),
            out(self.args),
            self.args.chat.show_thoughts,
        );
        let mut said = prompt.clone();
        let stopped = Cell::new(false);
        let finish = answer(
            self.model,
            &mut self.cache,
            logits,
            &mut said,
            self.stop,
            &mut self.sampler,
            self.args,
            |id| {
                stream.push(id)?;
                if interrupt::wanted() {
                    stopped.set(true);
                    candle::bail!("interrupted");
                }
                Ok(())
            },
        );
        // The last token of an answer is fed only if another came after it.
        said.truncate(self.cache.len());
        self.held = said;
        let text = stream.finish()?;
        match finish {
            Ok(Finish::Stop(_)) => {}
            Ok(Finish::Length) if !self.args.quiet => {
                say!("the answer ends after {} tokens (-n)", self.args.sample_len)
            }
            Ok(Finish::Length) => {}
            Ok(Finish::ContextFull) => say!(
                "context full: the answer ends at {limit} tokens; /save FILE keeps the conversation, /reset begins anew, a larger --max-context holds more"
            ),
            Err(_) if stopped.get() => say!("interrupted: the answer ends here"),
            Err(e) => return Err(e.into()),
        }
        Ok(Some(text))
    }

    /// Goes back to what the cache holds of the prompt's beginning, or to nothing.
    fn keep_prefix(&mut self, prompt: &[u32]) -> Result<()> {
        // The last token is always fed: its logits are the answer's beginning.
        let common = common_prefix(&self.held, prompt).min(prompt.len() - 1);
        match self.cache.reusable(common) {
            0 => {
                self.forget();
                let answer = self.args.sample_len.min(1024);
                self.cache.reserve(prompt.len() + answer);
            }
            kept => {
                self.cache.truncate(kept)?;
                self.held.truncate(kept);
            }
        }
        Ok(())
    }

    /// Feeds tokens; `None` if that was interrupted.
    fn read(&mut self, tokens: &[u32]) -> Result<Option<candle::Tensor>> {
        let before = self.cache.len();
        let logits = prefill(
            self.model,
            &mut self.cache,
            tokens,
            self.args,
            interrupt::wanted,
        )?;
        let read = self.cache.len() - before;
        self.held.extend_from_slice(&tokens[..read]);
        Ok(logits)
    }
}
