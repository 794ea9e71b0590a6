//! A hub on this machine: HTTP/1.1 as far as a download needs it, with the faults that a test asks for.

use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const MODEL: &str = "tests/tiny";

/// What one request was.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub headers: HashMap<String, String>,
}

#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Of bodies longer than 64 KiB, the first is cut here, in percent.
    pub cut_once: Option<usize>,
    /// 200 with the whole file, whatever range was asked for.
    pub no_ranges: bool,
    /// The body of this file is another of its length.
    pub corrupt: Option<&'static str>,
    /// Every answer is this status, with this X-Error-Code.
    pub refuse: Option<(u16, &'static str)>,
    /// Large files are redirected to this address.
    pub cdn: Option<String>,
    /// The first large body stops in the middle for so long.
    pub stall_once: Option<Duration>,
    /// What the hub says that the size of this large file is, if it says anything.
    pub claim: Option<(&'static str, Option<u64>)>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    faults: Faults,
    seen: Vec<Seen>,
}

pub struct MockHub {
    pub address: String,
    state: Arc<Mutex<State>>,
}

impl MockHub {
    pub fn serve(files: impl IntoIterator<Item = (&'static str, Vec<u8>)>, faults: Faults) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let files = files.into_iter().map(|(n, data)| (n.to_string(), data));
        let state = Arc::new(Mutex::new(State {
            files: files.collect(),
            faults,
            seen: Vec::new(),
        }));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, state) = (stream.unwrap(), shared.clone());
                // A client that hangs up is no fault of the hub.
                std::thread::spawn(move || drop(answer(stream, &state)));
            }
        });
        Self { address, state }
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.state.lock().unwrap().seen.clone()
    }

    /// Paths that were fetched, without what was only asked about.
    pub fn fetched(&self) -> Vec<String> {
        let gets = self.seen().into_iter().filter(|seen| seen.method == "GET");
        gets.map(|seen| seen.path.rsplit('/').next().unwrap().to_string())
            .collect()
    }
}

pub fn sha256(data: &[u8]) -> String {
    hex(&Sha256::digest(data))
}

/// The name that git gives a file of this content.
pub fn git_blob(data: &[u8]) -> String {
    let named = [format!("blob {}\0", data.len()).as_bytes(), data].concat();
    hex(&Sha1::digest(named))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

fn answer(mut stream: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(str::to_string);
    let (method, path) = (
        words.next().unwrap_or_default(),
        words.next().unwrap_or_default(),
    );
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').unwrap();
        headers.insert(name.to_ascii_lowercase(), value.trim().to_string());
    }
    let range = headers.get("range").map(|r| {
        let start = r.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap();
        start.parse::<usize>().unwrap()
    });
    let name = path
        .split("/resolve/")
        .nth(1)
        .and_then(|rest| rest.split_once('/'));
    let name = name
        .map_or(path.trim_start_matches("/cdn/"), |(_, name)| name)
        .to_string();
    let (faults, file) = {
        let mut state = state.lock().unwrap();
        state.seen.push(Seen {
            method: method.clone(),
            path: path.clone(),
            headers,
        });
        let faults = state.faults.clone();
        let file = state.files.get(&name).cloned();
        if method == "GET"
            && file.as_ref().is_some_and(|f| f.len() > 65_536)
            && faults.cdn.is_none()
        {
            state.faults.cut_once = None;
            state.faults.stall_once = None;
        }
        (faults, file)
    };
    let mut head = |status: u16, lines: &[String]| {
        let text = format!(
            "HTTP/1.1 {status} .\r\nConnection: close\r\n{}\r\n",
            lines.concat()
        );
        stream.write_all(text.as_bytes())
    };
    if let Some((status, code)) = faults.refuse {
        return head(
            status,
            &[format!("X-Error-Code: {code}\r\nContent-Length: 0\r\n")],
        );
    }
    let Some(file) = file else {
        return head(
            404,
            &["X-Error-Code: EntryNotFound\r\nContent-Length: 0\r\n".to_string()],
        );
    };
    let large = file.len() > 65_536;
    let size = match faults.claim {
        Some((of, size)) if of == name => size,
        _ => Some(file.len() as u64),
    };
    let mut lines = vec![format!("X-Repo-Commit: {COMMIT}\r\n")];
    match large {
        true => {
            lines.push(format!("X-Linked-Etag: \"{}\"\r\n", sha256(&file)));
            lines.extend(size.map(|size| format!("X-Linked-Size: {size}\r\n")));
        }
        false => lines.push(format!("ETag: \"{}\"\r\n", git_blob(&file))),
    }
    if let (true, Some(cdn), true) = (large, &faults.cdn, path.contains("/resolve/")) {
        lines.push(format!(
            "Location: {cdn}/cdn/{name}\r\nContent-Length: 0\r\n"
        ));
        return head(302, &lines);
    }
    let mut body = file;
    if faults.corrupt == Some(&name) {
        let middle = body.len() / 2;
        body[middle] ^= 1;
    }
    let whole = body.len();
    let status = match range {
        Some(start) if !faults.no_ranges => {
            body.drain(..start);
            lines.push(format!(
                "Content-Range: bytes {start}-{}/{whole}\r\n",
                whole - 1
            ));
            206
        }
        _ => 200,
    };
    if size.is_some() {
        lines.push(format!("Content-Length: {}\r\n", body.len()));
    }
    head(status, &lines)?;
    if method == "HEAD" {
        return Ok(());
    }
    if let (Some(percent), true) = (faults.cut_once, large) {
        body.truncate(body.len() * percent / 100);
    }
    if let (Some(pause), true) = (faults.stall_once, large) {
        stream.write_all(&body[..body.len() / 2])?;
        stream.flush()?;
        std::thread::sleep(pause);
        return Ok(());
    }
    stream.write_all(&body)
}
