//! A conversation with the trained model as its users hold it: turns on stdin, answers on stdout.

use crate::common::{self, repository, trained_model};
use crate::example_chat::Conversation;
use std::io::{Read, Write};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

fn start(args: &[&str]) -> Child {
    common::start("gemma4", &[&["--chat"], args].concat())
}

/// Status, stdout, stderr.
fn chat(args: &[&str], lines: &str) -> (bool, String, String) {
    let mut child = start(args);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(lines.as_bytes()).unwrap();
    drop(stdin);
    let out = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.success(), text(out.stdout), text(out.stderr))
}

/// A turn of more tokens than the window of 256 that hides the words.
fn long_turn() -> String {
    let demo = std::fs::read_to_string(trained_model().join("demo.txt")).unwrap();
    let story: String = demo.chars().take(2000).collect();
    let story = story.replace(['\n', '\r'], " ");
    format!("{story} The secret words are cloak, silver and window. Remember them. What are the secret words?\n")
}

/// Without and with something in a prompt that the next one no longer has.
#[test]
fn a_second_turn_that_reuses_the_first_answers_as_a_cold_run() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("thought.jinja");
    let built_in = repository().join("examples/gemma4/chat/built_in.jinja");
    let with_thought = std::fs::read_to_string(built_in).unwrap() + "{{ 'thought: none\n' }}";
    std::fs::write(&template, with_thought).unwrap();
    for path in ["reference", "fused", "fused-kv"] {
        for form in [vec![], vec!["--chat-template", template.to_str().unwrap()]] {
            let args = [&["-n", "16", "--attention", path], &form[..]].concat();
            let saved = folder.path().join("first.json");
            let save = format!("/save {}\n", saved.display());
            let ask = "What are the secret words?\n";
            let (success, warm, log) = chat(&args, &(long_turn() + &save + ask));
            assert!(success, "{log}");
            assert_eq!(log.matches("reused ").count(), 1, "{log}");
            let load = format!("/load {}\n", saved.display());
            let (success, cold, log) = chat(&args, &(load + ask));
            assert!(success, "{log}");
            assert_eq!(log.matches("reused ").count(), 0, "{log}");
            let (first, second) = warm.split_at(warm.len() - cold.len());
            assert_eq!(second, cold);
            assert!(!first.is_empty() && !cold.trim().is_empty());
            if form.is_empty() {
                assert_eq!(first, "The secret words are cloak, silver and window.\n");
            }
        }
    }
}

#[test]
fn commands_change_the_conversation_and_mistakes_are_told_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.json");
    let (save, load) = (
        format!("/save {}", file.display()),
        format!("/load {}", file.display()),
    );
    let lines = [
        "//slash \\",
        "and more",
        "/system Be brief.",
        "/think on",
        &save,
        "/reset",
        &load,
        "/nonsense",
        "/think maybe",
        "/help",
        "/quit",
        "never read",
    ]
    .join("\n");
    let (success, out, log) = chat(&["-n", "4", "-q"], &lines);
    assert!(!success);
    assert_eq!(out.lines().count(), 1, "{out}");
    for want in [
        "/nonsense is no command, /help lists them; //nonsense says it to the model",
        "/think: got \"maybe\", want on or off",
        "/load FILE",
        "2 of the lines on stdin failed",
    ] {
        assert!(log.contains(want), "{log}");
    }
    assert!(!log.contains("> "), "a prompt is for a terminal: {log}");
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(saved["system"], "Be brief.");
    assert_eq!(saved["think"], true);
    assert_eq!(saved["turns"][0]["content"], "/slash \nand more");
    assert_eq!(saved["turns"][1]["content"], out.trim());
}

#[test]
fn a_full_context_is_said_with_what_to_do_and_the_session_goes_on() {
    let lines = long_turn() + "/reset\nHi\n";
    let (success, out, log) = chat(&["-n", "3", "--max-context", "200"], &lines);
    assert!(!success);
    assert!(
        log.contains("context full: the conversation takes "),
        "{log}"
    );
    assert!(log.contains("/reset begins anew"), "{log}");
    assert_eq!(out.lines().count(), 1, "{out}");
}

/// At whatever byte it dies, the name holds a whole conversation.
#[test]
fn a_save_that_is_killed_leaves_no_half_file_under_the_name() {
    let turn = |role, i| serde_json::json!({"role": role, "content": format!("{i} ").repeat(2000)});
    let pairs = (0..500).flat_map(|i| [turn("user", i), turn("model", i)]);
    let long = serde_json::json!({"turns": pairs.collect::<Vec<_>>()}).to_string();
    let mut halfway = 0;
    for pause in [0, 3, 10, 30] {
        let folder = tempfile::tempdir().unwrap();
        let file = |name| folder.path().join(name);
        std::fs::write(file("long.json"), &long).unwrap();
        std::fs::write(file("talk.json"), r#"{"turns": []}"#).unwrap();
        let mut child = start(&["-q"]);
        let load = format!("/load {}\n", file("long.json").display());
        let save = format!("/save {}\n", file("talk.json").display());
        // Far more than it gets to.
        let lines = load + &save.repeat(200);
        child
            .stdin
            .as_mut()
            .unwrap()
            .write_all(lines.as_bytes())
            .unwrap();
        let parts = || std::fs::read_dir(folder.path()).unwrap().count() > 2;
        let begun = Instant::now();
        while !parts() {
            assert!(begun.elapsed() < Duration::from_secs(60), "no save begins");
        }
        std::thread::sleep(Duration::from_millis(pause));
        child.kill().unwrap();
        child.wait().unwrap();
        halfway += usize::from(parts());
        let saved = std::fs::read(file("talk.json")).unwrap();
        let saved: serde_json::Value = serde_json::from_slice(&saved).unwrap();
        assert!([0, 1000].contains(&saved["turns"].as_array().unwrap().len()));
    }
    assert!(halfway > 0, "no save was killed before it was done");
}

/// Ctrl-C.
#[cfg(unix)]
#[test]
fn an_interrupt_ends_the_answer_and_keeps_the_session() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.json");
    // So hot that it says one token as well as another, and rarely the one that ends.
    let mut child = start(&["-n", "100000", "--temperature", "1000", "--seed", "3"]);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"Hi\n").unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0];
    stdout.read_exact(&mut first).unwrap();
    let pid = child.id().to_string();
    assert!(Command::new("kill")
        .args(["-INT", &pid])
        .status()
        .unwrap()
        .success());
    write!(stdin, "/save {}\n/quit\n", file.display()).unwrap();
    drop(stdin);
    let mut rest = vec![];
    stdout.read_to_end(&mut rest).unwrap();
    let out = child.wait_with_output().unwrap();
    let log = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success(), "{log}");
    assert!(log.contains("interrupted: the answer ends here"), "{log}");
    let shown = String::from_utf8([&first[..], &rest].concat()).unwrap();
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(saved["turns"][1]["content"], shown.trim());
}

#[test]
fn a_line_that_is_no_text_and_a_file_without_end_are_told_and_the_session_goes_on() {
    let mut child = start(&["-n", "4"]);
    let lines = b"/load /dev/zero\n\xff\xfe\n/system Be brief.\n";
    child.stdin.take().unwrap().write_all(lines).unwrap();
    let out = child.wait_with_output().unwrap();
    let log = String::from_utf8(out.stderr).unwrap();
    assert!(!out.status.success());
    for want in [
        "/dev/zero: is no regular file",
        "a line on stdin is not UTF-8",
        "2 of the lines on stdin failed",
    ] {
        assert!(log.contains(want), "{log}, want {want}");
    }
}

#[test]
fn who_may_read_a_saved_conversation_does_not_change() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.json");
    Conversation::default().save(&file).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    Conversation::default().save(&file).unwrap();
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let error = Conversation::default().save(folder.path()).unwrap_err();
    assert!(
        error.to_string().contains("is there and no regular file"),
        "{error}"
    );
}
