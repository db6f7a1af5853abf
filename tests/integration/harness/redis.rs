//! A real Redis without persistence.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::process::{Process, Start, tool};
use super::processor::closed_port;
use super::{eventually, within};

/// A running Redis; dropping it kills it.
#[derive(Debug)]
pub struct Redis {
    process: Process,
    address: SocketAddr,
}

impl Redis {
    /// Starts it on a free port.
    pub async fn start() -> Redis {
        Redis::start_with(Vec::new).await
    }

    /// The same with further arguments, which may name ports that were free: they are made anew for each try.
    pub async fn start_with(more: impl Fn() -> Vec<String>) -> Redis {
        // Redis cannot pick a port itself. Between our look and its bind somebody else may take the port: try again.
        for _ in 0..10 {
            if let Some(redis) = Redis::start_as(closed_port(), None, &more()).await {
                return redis;
            }
        }
        panic!("no free port for Redis");
    }

    /// A sentinel that watches over the server at `primary` under the name of `main`, and is alone in that.
    pub async fn start_sentinel(primary: SocketAddr) -> Redis {
        let lines = [
            format!("sentinel monitor main {} {} 1", primary.ip(), primary.port()),
            "sentinel down-after-milliseconds main 500".to_owned(),
            "sentinel failover-timeout main 3000".to_owned(),
        ];
        for _ in 0..10 {
            if let Some(redis) = Redis::start_as(closed_port(), Some(&lines), &[]).await {
                return redis;
            }
        }
        panic!("no free port for a sentinel");
    }

    /// Starts it on a given address, such as that of one that was killed; `None` when it does not come up there.
    pub async fn start_on(address: SocketAddr) -> Option<Redis> {
        Redis::start_as(address, None, &[]).await
    }

    async fn start_as(address: SocketAddr, sentinel: Option<&[String]>, more: &[String]) -> Option<Redis> {
        let mut start = Start::new("redis", tool("TANDEM_TEST_REDIS", "redis-server"));
        let port = address.port().to_string();
        if let Some(lines) = sentinel {
            // A sentinel writes what it finds out into its file.
            let file = start.directory().join("sentinel.conf");
            std::fs::write(&file, lines.join("\n")).expect("write the sentinel's file");
            start.arg(file).arg("--sentinel");
        } else {
            start.args(["--save", "", "--appendonly", "no"]);
        }
        start.args(["--port", &port, "--bind", "127.0.0.1", "--protected-mode", "no"]).args(more);
        let redis = Redis { process: start.spawn(), address };
        let up = eventually(Duration::from_secs(20), "redis answers", async || {
            if redis.process.status().is_some() {
                return Some(false);
            }
            let answer = redis.try_command(&["PING"]).await.ok()?;
            (answer == "+PONG").then_some(true)
        })
        .await;
        // Another server on that port would answer the ping as well; ours has then ended, or is about to.
        (up && redis.process.status().is_none()).then_some(redis)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address as `REDIS_URL` wants it.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// The process, for signals.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Runs a command; the first line of its reply (`+OK`, `:3`, `-ERR …`), for a bulk reply its text.
    pub async fn command(&self, words: &[&str]) -> String {
        self.try_command(words).await.expect("talk to Redis")
    }

    /// Every key that replicas made has a TTL, and there are such keys.
    pub async fn assert_keys_expire(&self) {
        let script = "local bad = {} for _, key in ipairs(redis.call('KEYS', 'tandem:*')) do \
                      if redis.call('PTTL', key) < 0 then bad[#bad + 1] = key end end return table.concat(bad, ' ')";
        assert_eq!(self.command(&["EVAL", script, "0"]).await, "", "keys without a TTL");
        let keys = self.command(&["EVAL", "return #redis.call('KEYS', 'tandem:*')", "0"]).await;
        assert_ne!(keys, ":0", "there are keys to look at");
    }

    /// The same where the server may end the connection instead.
    pub async fn try_command(&self, words: &[&str]) -> std::io::Result<String> {
        within(&format!("reply of Redis to {words:?}"), self.exchange(words)).await
    }

    async fn exchange(&self, words: &[&str]) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(self.address).await?;
        let words: Vec<String> = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
        let request = format!("*{}\r\n{}", words.len(), words.concat());
        stream.write_all(request.as_bytes()).await?;
        let mut reply = Vec::new();
        loop {
            if let Some(text) = simple_reply(&reply) {
                return Ok(text);
            }
            if stream.read_buf(&mut reply).await? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// A complete reply of one line, or of one bulk string.
fn simple_reply(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let (line, rest) = text.split_once("\r\n")?;
    match line.strip_prefix('$').map(str::parse::<usize>) {
        Some(Ok(length)) if rest.len() < length + 2 => None,
        Some(Ok(length)) => Some(rest.get(..length)?.to_owned()),
        _ => Some(line.to_owned()),
    }
}
