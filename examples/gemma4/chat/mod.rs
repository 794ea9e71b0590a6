//! A conversation as tokens: what was said, the template that writes it, and ids in which only the template has control tokens.

mod clock;
mod conversation;
mod encoder;
mod meter;
mod template;
pub mod template_file;

pub use conversation::{Conversation, Role};
pub use encoder::{Encoder, Piece};
pub use template::Template;

use anyhow::Result;

/// What turns a conversation into a prompt.
pub struct Form {
    pub template: Template,
    pub bos: u32,
}

impl Form {
    /// The prompt for the model's next turn, with exactly one BOS.
    pub fn prompt(&self, conversation: &Conversation, encoder: &Encoder) -> Result<Vec<u32>> {
        let pieces = self
            .template
            .render(conversation, encoder.name(self.bos).as_deref())?;
        encoder.encode(&pieces, self.bos)
    }

    /// The ids that end a turn: the one that this template writes after an answer, and Gemma's own.
    pub fn end_of_turn(&self, encoder: &Encoder) -> Result<Vec<u32>> {
        let mut probe = Conversation::default();
        probe.push(Role::User, "a");
        probe.push(Role::Model, "b");
        probe.push(Role::User, "c");
        let pieces = self
            .template
            .render(&probe, encoder.name(self.bos).as_deref())?;
        let answer = pieces
            .iter()
            .position(|piece| *piece == Piece::Content("b".into()));
        let after = match answer.and_then(|at| pieces.get(at + 1)) {
            Some(Piece::Template(text)) => encoder.first_control(text),
            _ => None,
        };
        let mut ids: Vec<u32> = after.into_iter().collect();
        ids.extend(encoder.id("<turn|>").filter(|id| !ids.contains(id)));
        Ok(ids)
    }

    /// How much of `prompt` the next turn's prompt will still begin with; the rest, such as an empty thought that opens the
    /// answer, is written for this turn alone.
    pub fn lasting(
        &self,
        conversation: &Conversation,
        prompt: &[u32],
        encoder: &Encoder,
    ) -> Result<usize> {
        let mut next = conversation.clone();
        next.push(Role::Model, "a");
        next.push(Role::User, "b");
        Ok(common_prefix(prompt, &self.prompt(&next, encoder)?))
    }
}

/// How many ids both begin with.
pub fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
