//! Just enough of the Redis protocol to send many commands at once and read what comes back.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A reply.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    Nil,
    Number(i64),
    /// A status or a bulk string.
    Bytes(Vec<u8>),
    Error(String),
    List(Vec<Reply>),
}

impl Reply {
    pub fn bytes(self) -> Vec<u8> {
        match self {
            Reply::Bytes(bytes) => bytes,
            other => panic!("bytes expected, not {other:?}"),
        }
    }

    pub fn text(self) -> String {
        String::from_utf8(self.bytes()).expect("text")
    }

    pub fn number(&self) -> i64 {
        match self {
            Reply::Number(number) => *number,
            other => panic!("a number expected, not {other:?}"),
        }
    }

    pub fn list(self) -> Vec<Reply> {
        match self {
            Reply::List(list) => list,
            other => panic!("a list expected, not {other:?}"),
        }
    }
}

/// A blocking connection.
pub struct Connection {
    stream: BufReader<TcpStream>,
    out: Vec<u8>,
    owed: usize,
}

impl Connection {
    pub fn open(address: SocketAddr) -> Connection {
        let stream = TcpStream::connect(address).expect("connect to Redis");
        stream.set_nodelay(true).expect("no delay");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a deadline");
        Connection { stream: BufReader::with_capacity(1 << 16, stream), out: Vec::new(), owed: 0 }
    }

    /// Adds a command to what the next flush sends.
    pub fn queue(&mut self, words: &[&[u8]]) {
        write!(self.out, "*{}\r\n", words.len()).expect("to memory");
        for word in words {
            write!(self.out, "${}\r\n", word.len()).expect("to memory");
            self.out.extend_from_slice(word);
            self.out.extend_from_slice(b"\r\n");
        }
        self.owed += 1;
    }

    /// Sends what was queued, and reads a reply to each.
    pub fn flush(&mut self) -> Vec<Reply> {
        self.stream.get_mut().write_all(&self.out).expect("send");
        self.out.clear();
        let owed = std::mem::take(&mut self.owed);
        (0..owed).map(|_| self.read()).collect()
    }

    pub fn ask(&mut self, words: &[&[u8]]) -> Reply {
        self.queue(words);
        self.flush().pop().expect("one reply")
    }

    pub fn say(&mut self, line: &str) -> Reply {
        let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
        self.ask(&words)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("a line");
        assert!(line.ends_with("\r\n"), "the connection ended");
        line.truncate(line.len() - 2);
        line
    }

    fn read(&mut self) -> Reply {
        let line = self.line();
        let rest = &line[1..];
        let count = || rest.parse::<i64>().expect("a number");
        match line.as_bytes()[0] {
            b'+' => Reply::Bytes(rest.as_bytes().to_vec()),
            b'-' => Reply::Error(rest.to_owned()),
            b':' => Reply::Number(count()),
            b'$' | b'*' if count() < 0 => Reply::Nil,
            b'$' => {
                let mut bytes = vec![0; usize::try_from(count()).expect("a length") + 2];
                self.stream.read_exact(&mut bytes).expect("bytes");
                bytes.truncate(bytes.len() - 2);
                Reply::Bytes(bytes)
            }
            b'*' => Reply::List((0..count()).map(|_| self.read()).collect()),
            other => panic!("unknown reply {other}"),
        }
    }

    /// Messages on subscribed channels that have arrived. A half message is waited for.
    pub fn messages(&mut self) -> Vec<Vec<u8>> {
        let mut messages = Vec::new();
        loop {
            if self.stream.buffer().is_empty() {
                self.stream.get_ref().set_nonblocking(true).expect("non-blocking");
                let arrived = self.stream.fill_buf().is_ok_and(|bytes| !bytes.is_empty());
                self.stream.get_ref().set_nonblocking(false).expect("blocking");
                if !arrived {
                    return messages;
                }
            }
            let mut parts = self.read().list();
            messages.push(parts.pop().expect("a message").bytes());
        }
    }
}
