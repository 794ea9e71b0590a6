//! One file into the cache: what is already there is kept, and nothing gets its final name before it was checked.

use super::cache::{create_parent, Cache};
use super::client::{text, Client, Meta};
use super::progress::Progress;
use anyhow::{bail, Context, Result};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::http::StatusCode;

/// Attempts in a row that bring no byte.
const ATTEMPTS: u32 = 5;
const BUFFER: usize = 1 << 20;

/// Bytes of an earlier download that was cut.
pub fn partial_len(cache: &Cache, meta: &Meta) -> u64 {
    std::fs::metadata(partial(cache, meta)).map_or(0, |file| file.len())
}

/// As huggingface_hub names it, so that one goes on where the other was cut.
fn partial(cache: &Cache, meta: &Meta) -> PathBuf {
    cache.blob(&format!("{}.incomplete", meta.etag))
}

/// Makes sure that the blob of a file is there.
pub fn fetch(client: &Client, cache: &Cache, commit: &str, file: &str, meta: &Meta) -> Result<()> {
    let (blob, partial) = (cache.blob(&meta.etag), partial(cache, meta));
    let _lock = lock(&cache.lock(&meta.etag), file)?;
    // Perhaps another process brought it in the meantime.
    if blob.is_file() {
        return Ok(());
    }
    create_parent(&partial)?;
    let progress = Progress::new(file, meta.size);
    let mut fruitless = 0;
    loop {
        let before = partial_len(cache, meta);
        match attempt(client, commit, file, meta, &partial, before, &progress)? {
            None => break,
            Some(why) => {
                fruitless = match partial_len(cache, meta) > before {
                    true => 1,
                    false => fruitless + 1,
                };
                if fruitless >= ATTEMPTS {
                    bail!("hub: {file}: {why}, {ATTEMPTS} times in a row; what came is kept, run again to go on");
                }
                progress.say(&format!(
                    "{why}; going on from {} bytes",
                    partial_len(cache, meta)
                ));
                std::thread::sleep(Duration::from_millis(250 << fruitless));
            }
        }
    }
    check(&partial, file, meta)?;
    let place = || blob.display().to_string();
    std::fs::rename(&partial, &blob).with_context(place)?;
    progress.done(std::fs::metadata(&blob).with_context(place)?.len());
    Ok(())
}

/// Downloads what is missing; if that fails in a way that another attempt may mend, returns how.
fn attempt(
    client: &Client,
    commit: &str,
    file: &str,
    meta: &Meta,
    partial: &Path,
    have: u64,
    progress: &Progress,
) -> Result<Option<String>> {
    if have > 0 && have == meta.size {
        return Ok(None);
    }
    // More than all of it can't be the beginning of it.
    let start = if have > meta.size { 0 } else { have };
    let mut response = match client.get(commit, file, start) {
        Ok(response) => response,
        Err(error) => return Ok(Some(format!("{error:#}"))),
    };
    let status = response.status();
    let from = match status {
        StatusCode::PARTIAL_CONTENT => match range_start(text(response.headers(), "content-range"))
        {
            Some(from) if from == start => from,
            _ => bail!(
                "hub: {file}: asked for bytes from {start}, got Content-Range {:?}",
                text(response.headers(), "content-range")
            ),
        },
        // The whole file: a server that knows no ranges.
        StatusCode::OK => 0,
        StatusCode::RANGE_NOT_SATISFIABLE => {
            std::fs::remove_file(partial).with_context(|| partial.display().to_string())?;
            return Ok(Some("the server has no such range".to_string()));
        }
        _ if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            return Ok(Some(format!("the server says {status}")))
        }
        _ => {
            client.check(&response, commit, file)?;
            bail!("hub: {file}: the server says {status}");
        }
    };
    let place = || format!("hub: {}", partial.display());
    let mut out = OpenOptions::new()
        .create(true)
        .append(true)
        .open(partial)
        .with_context(place)?;
    out.set_len(from).with_context(place)?;
    let mut body = response.body_mut().as_reader();
    let (mut at, mut buffer) = (from, vec![0; BUFFER]);
    loop {
        progress.at(at);
        match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                out.write_all(&buffer[..n]).with_context(place)?;
                at += n as u64;
            }
            Err(error) => return Ok(Some(format!("cut at {at} bytes: {error}"))),
        }
        if at > meta.size {
            break;
        }
    }
    out.sync_all().with_context(place)?;
    Ok((at < meta.size).then(|| format!("cut at {at} of {} bytes", meta.size)))
}

/// `5` of `bytes 5-9/10`.
fn range_start(header: Option<&str>) -> Option<u64> {
    header?
        .strip_prefix("bytes ")?
        .split('-')
        .next()?
        .parse()
        .ok()
}

/// Size and digest; a file that fails is removed.
fn check(partial: &Path, file: &str, meta: &Meta) -> Result<()> {
    let place = || partial.display().to_string();
    let refuse = |what: String| -> Result<()> {
        std::fs::remove_file(partial).with_context(place)?;
        bail!("hub: {file}: {what}; what came was removed, run again")
    };
    let len = std::fs::metadata(partial).with_context(place)?.len();
    if len != meta.size {
        return refuse(format!("got {len} bytes, want {}", meta.size));
    }
    let (name, got) = match meta.etag.len() {
        64 => ("SHA-256", digest(partial, Sha256::new())),
        // Small files go by what git calls them.
        40 => {
            let blob = Sha1::new_with_prefix(format!("blob {len}\0"));
            ("SHA-1 as a git blob", digest(partial, blob))
        }
        // No digest that is known.
        _ => return Ok(()),
    };
    match got.with_context(place)? {
        got if got == meta.etag.to_ascii_lowercase() => Ok(()),
        got => refuse(format!("its {name} is {got}, want {}", meta.etag)),
    }
}

/// Of a file, after what `hash` has taken already; in hexadecimal digits.
fn digest(file: &Path, mut hash: impl Digest) -> std::io::Result<String> {
    let (mut data, mut buffer) = (File::open(file)?, vec![0; BUFFER]);
    loop {
        match data.read(&mut buffer)? {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
    }
    let bytes = hash.finalize();
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Held until it is dropped; waits for another process that downloads the same.
fn lock(path: &Path, file: &str) -> Result<File> {
    let place = || path.display().to_string();
    create_parent(path)?;
    let lock = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(place)?;
    if lock.try_lock().is_err() {
        say!("{file}: waiting for another process that downloads it");
        lock.lock().with_context(place)?;
    }
    Ok(lock)
}
