//! Requests to the hub, and what its refusals mean.

use super::cache::{home, is_name, variable};
use anyhow::{anyhow, bail, Context, Result};
use std::time::Duration;
use ureq::http::{header, HeaderMap, Response, StatusCode, Uri};
use ureq::{Agent, Body};

const REDIRECTS: usize = 10;

/// What the hub says of a file.
pub struct Meta {
    pub commit: String,
    /// Name of the blob; of a large file its SHA-256.
    pub etag: String,
    pub size: u64,
}

/// The repository has no file of this name.
#[derive(Debug)]
pub struct NoSuchFile(String);

impl std::fmt::Display for NoSuchFile {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoSuchFile {}

pub struct Client {
    agent: Agent,
    endpoint: Uri,
    /// `endpoint/owner/model`.
    page: String,
    model_id: String,
    token: Option<String>,
}

impl Client {
    pub fn new(model_id: &str) -> Result<Self> {
        let endpoint = variable("HF_ENDPOINT").unwrap_or("https://huggingface.co".to_string());
        let endpoint = endpoint.trim_end_matches('/');
        let page = format!("{endpoint}/{model_id}");
        let uri: Uri = page
            .parse()
            .with_context(|| format!("HF_ENDPOINT is {endpoint:?}"))?;
        if uri.authority().is_none() || !matches!(uri.scheme_str(), Some("http" | "https")) {
            bail!("HF_ENDPOINT is {endpoint:?}, want the http or https address of a hub");
        }
        let patience = Duration::from_secs(match variable("HF_HUB_DOWNLOAD_TIMEOUT") {
            None => 30,
            Some(seconds) => match seconds.parse() {
                Ok(seconds) if seconds > 0 => seconds,
                _ => bail!("HF_HUB_DOWNLOAD_TIMEOUT is {seconds:?}, want whole seconds"),
            },
        });
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            // Followed here, where the token goes to the hub alone.
            .max_redirects(0)
            .user_agent(concat!("candle-gem/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_connect(Some(patience))
            .timeout_recv_response(Some(patience))
            .timeout_per_read(Some(patience))
            .build();
        Ok(Self {
            agent: agent.into(),
            endpoint: uri,
            page,
            model_id: model_id.to_string(),
            token: token()?,
        })
    }

    pub fn look_up(&self, revision: &str, file: &str) -> Result<Meta> {
        let url = self.url(revision, file);
        let response = self.follow(
            &url,
            |headers| headers.contains_key("x-linked-etag"),
            |url| {
                let request = self.agent.head(url.to_string());
                match self.authorization(url) {
                    Some(token) => request.header(header::AUTHORIZATION, token).call(),
                    None => request.call(),
                }
            },
        )?;
        self.check(&response, revision, file)?;
        let headers = response.headers();
        let etag = text(headers, "x-linked-etag")
            .or(text(headers, "etag"))
            .map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
        let missing = |name: &str| {
            anyhow!("hub: {url}: the answer has no {name}; download the files otherwise and name them with --weight-files")
        };
        let size = match text(headers, "x-linked-size") {
            Some(size) => Some(size),
            // Of a redirect, the length is that of its own text.
            None if response.status().is_success() => text(headers, "content-length"),
            None => None,
        };
        let commit = text(headers, "x-repo-commit").ok_or_else(|| missing("X-Repo-Commit"))?;
        let etag = etag.ok_or_else(|| missing("ETag"))?;
        for (name, value) in [("X-Repo-Commit", commit), ("ETag", etag)] {
            if !is_name(value) {
                bail!("hub: {url}: {name} is {value:?}, want a digest");
            }
        }
        Ok(Meta {
            commit: commit.to_string(),
            etag: etag.to_string(),
            // Without it nothing would end a download but a full disk.
            size: size
                .and_then(|size| size.parse().ok())
                .ok_or_else(|| missing("usable Content-Length or X-Linked-Size"))?,
        })
    }

    /// The file from byte `start` on, or whatever the server says to that.
    pub fn get(&self, revision: &str, file: &str, start: u64) -> Result<Response<Body>> {
        self.follow(
            &self.url(revision, file),
            |_| false,
            |url| {
                let mut request = self.agent.get(url.to_string());
                if start > 0 {
                    request = request.header(header::RANGE, format!("bytes={start}-"));
                }
                match self.authorization(url) {
                    Some(token) => request.header(header::AUTHORIZATION, token).call(),
                    None => request.call(),
                }
            },
        )
    }

    /// Fails with what a refusal means and what helps.
    pub fn check(&self, response: &Response<Body>, revision: &str, file: &str) -> Result<()> {
        let (id, page) = (&self.model_id, &self.page);
        let code = text(response.headers(), "x-error-code").unwrap_or_default();
        match (response.status(), code) {
            (_, "GatedRepo") | (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => {
                let token = match &self.token {
                    None => "set HF_TOKEN to a token of the account that did",
                    Some(_) => "check that the token in HF_TOKEN is of the account that did, and may read gated models",
                };
                bail!(
                    "hub: no access to {id} (status {}): it is gated, private or not there; accept its licence at {page}, then {token}",
                    response.status().as_u16()
                )
            }
            (_, "RepoNotFound") => bail!("hub: there is no model {id} at {page}: check --model-id, or set HF_TOKEN if it is private"),
            (_, "RevisionNotFound") => bail!("hub: {id} has no revision {revision}: check --revision, see {page}/tree/main"),
            (StatusCode::NOT_FOUND, "EntryNotFound" | "") => {
                let what = format!("hub: {id} has no file {file} at {revision} (or no such revision, or there is no such model): see {page}/tree/main");
                Err(NoSuchFile(what).into())
            }
            (status, _) if status.is_success() || status.is_redirection() => Ok(()),
            (status, _) => bail!("hub: {file} of {id}: the server says {status}"),
        }
    }

    fn url(&self, revision: &str, file: &str) -> String {
        let file: Vec<_> = file.split('/').map(escaped).collect();
        format!(
            "{}/resolve/{}/{}",
            self.page,
            escaped(revision),
            file.join("/")
        )
    }

    fn authorization(&self, url: &Uri) -> Option<String> {
        let token = self.token.as_ref()?;
        let same =
            url.scheme() == self.endpoint.scheme() && url.authority() == self.endpoint.authority();
        same.then(|| format!("Bearer {token}"))
    }

    /// Sends to `url` and where it redirects to, up to an answer that is none, or is `enough`.
    fn follow(
        &self,
        url: &str,
        enough: impl Fn(&HeaderMap) -> bool,
        send: impl Fn(&Uri) -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>> {
        let mut at: Uri = url.parse().with_context(|| url.to_string())?;
        for _ in 0..REDIRECTS {
            let host = at.authority().map(|a| a.host()).unwrap_or_default();
            let response = send(&at).with_context(|| {
                format!("hub: can't reach {host}: check the network and HTTPS_PROXY, or use --offline if the model is in the cache")
            })?;
            if !response.status().is_redirection() || enough(response.headers()) {
                return Ok(response);
            }
            let Some(location) = text(response.headers(), "location") else {
                bail!("hub: {url}: redirected without a Location");
            };
            let next = match (location.strip_prefix('/'), at.scheme_str(), at.authority()) {
                (Some(path), Some(scheme), Some(host)) if !path.starts_with('/') => {
                    format!("{scheme}://{host}/{path}")
                }
                _ => location.to_string(),
            };
            let next: Uri = next
                .parse()
                .with_context(|| format!("hub: {url}: redirected to {next:?}"))?;
            if at.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
                bail!("hub: {url}: redirected to {next}, want https");
            }
            at = next;
        }
        bail!("hub: {url}: more than {REDIRECTS} redirects")
    }
}

pub fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn escaped(part: &str) -> String {
    let mut out = String::new();
    for byte in part.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                out.push(byte as char)
            }
            _ => out += &format!("%{byte:02X}"),
        }
    }
    out
}

/// From HF_TOKEN, or the file where `hf auth login` puts it.
fn token() -> Result<Option<String>> {
    let text = match variable("HF_TOKEN") {
        Some(token) => token,
        None => {
            let file = match variable("HF_TOKEN_PATH") {
                Some(file) => file.into(),
                None => home()?.join("token"),
            };
            match std::fs::read_to_string(&file) {
                Ok(token) => token,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                Err(e) => return Err(e).with_context(|| file.display().to_string()),
            }
        }
    };
    let token = text.trim();
    if token.chars().any(|c| !c.is_ascii_graphic()) {
        // Without the text: it is a secret.
        bail!("HF_TOKEN, or the token file, holds more than one word");
    }
    Ok((!token.is_empty()).then(|| token.to_string()))
}
