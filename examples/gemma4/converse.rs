//! Turns and commands, line by line from stdin; answers go to stdout, the rest to stderr.

use crate::chat::Conversation;
use crate::interrupt;
use crate::session::Session;
use crate::source::LARGEST;
use anyhow::{bail, Context, Result};
use std::io::{BufRead, IsTerminal, Read, StdinLock};
use std::path::Path;

const HELP: &str = "\
/reset          forget the conversation, keep the system text
/save FILE      write the conversation to FILE
/load FILE      go on with the conversation in FILE
/system TEXT    what the model is told before the conversation; nothing without TEXT
/think on|off   let the model think before it answers
/help           this list
/quit           end, as Ctrl-D
//TEXT          a turn that begins with /
A backslash at the end of a line continues the turn on the next one. Ctrl-C stops an answer.";

/// Until the input ends.
///
/// # Errors
///
/// What fails in one line is told and the next one is read; at the end, how many lines failed if nobody sat at a terminal.
pub fn converse(session: &mut Session) -> Result<()> {
    let stdin = std::io::stdin();
    let person = stdin.is_terminal();
    let mut input = stdin.lock();
    let mut failed = 0;
    interrupt::handle()?;
    loop {
        interrupt::answering(false);
        let Some(line) = read_turn(&mut input, person)? else {
            break;
        };
        interrupt::answering(true);
        let line = String::from_utf8(line).context("a line on stdin is not UTF-8");
        match line.and_then(|line| obey(session, &line)) {
            Ok(true) => {}
            Ok(false) => break,
            Err(e) => {
                failed += 1;
                say!("{e:#}");
            }
        }
    }
    match failed {
        0 => Ok(()),
        _ if person => Ok(()),
        _ => bail!("{failed} of the lines on stdin failed"),
    }
}

/// The next turn or command, without the end of its line.
fn read_turn(input: &mut StdinLock, person: bool) -> Result<Option<Vec<u8>>> {
    let mut turn = Vec::new();
    let mut prompt = "> ";
    loop {
        if person {
            interrupt::ask(prompt);
        }
        let begin = turn.len();
        let left = (LARGEST + 1).saturating_sub(begin as u64);
        let line = input.by_ref().take(left).read_until(b'\n', &mut turn);
        if line.context("stdin")? == 0 {
            return Ok(Some(turn).filter(|turn| !turn.is_empty()));
        }
        if turn.len() as u64 > LARGEST {
            // What is left of the line would be taken for another.
            bail!("stdin: a turn does not end, want at most {LARGEST} bytes");
        }
        while turn.len() > begin && turn.ends_with(b"\n") | turn.ends_with(b"\r") {
            turn.pop();
        }
        if turn.len() == begin || !turn.ends_with(b"\\") {
            return Ok(Some(turn));
        }
        turn.pop();
        turn.push(b'\n');
        prompt = ". ";
    }
}

/// Whether to go on.
fn obey(session: &mut Session, line: &str) -> Result<bool> {
    let Some(command) = line.strip_prefix('/') else {
        return match line.trim() {
            "" => Ok(true),
            content => session.ask(content).map(|()| true),
        };
    };
    if command.starts_with('/') {
        return session.ask(command).map(|()| true);
    }
    let (name, rest) = command
        .split_once(char::is_whitespace)
        .unwrap_or((command, ""));
    let rest = rest.trim();
    let conversation = &mut session.conversation;
    match (name, rest) {
        ("quit", "") => return Ok(false),
        ("help", "") => say!("{HELP}"),
        ("reset", "") => conversation.turns.clear(),
        ("system", text) => conversation.system = Some(text.to_string()).filter(|t| !t.is_empty()),
        ("think", "on") => conversation.think = true,
        ("think", "off") => conversation.think = false,
        ("think", other) => bail!("/think: got {other:?}, want on or off"),
        ("save" | "load", "") => bail!("/{name}: want the name of a file"),
        ("save", file) => conversation.save(Path::new(file))?,
        ("load", file) => *conversation = Conversation::load(Path::new(file))?,
        ("quit" | "help" | "reset", rest) => bail!("/{name}: got {rest:?}, want nothing after it"),
        _ => bail!("/{name} is no command, /help lists them; //{name} says it to the model"),
    }
    Ok(true)
}
