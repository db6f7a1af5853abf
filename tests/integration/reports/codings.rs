//! Request bodies with a content coding, through real Envoy with the shipped file, and through the front.

use std::io::Write;

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use tandem_sim::Fault;

use crate::bodies::members::{assert_decode_leg, assert_prefill_leg};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;

const PATH: &str = "/v1/chat/completions";

fn body() -> Vec<u8> {
    let text = "the quick brown fox ".repeat(2000);
    format!(r#"{{"model":"m","max_tokens":2,"messages":[{{"role":"user","content":"{text}"}}],"seed":7}}"#).into_bytes()
}

fn gzip(body: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body).expect("memory");
    encoder.finish().expect("memory")
}

fn zlib(body: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body).expect("memory");
    encoder.finish().expect("memory")
}

fn raw_deflate(body: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body).expect("memory");
    encoder.finish().expect("memory")
}

fn zstd(body: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(body, ruzstd::encoding::CompressionLevel::Fastest)
}

#[tokio::test(flavor = "multi_thread")]
async fn coded_bodies_reach_engines_decoded() {
    let sandbox = Sandbox::start(SandboxOptions::of(|mut config| {
        config.keep_bodies = true;
        config
    }))
    .await;
    let plain = body();
    for base in sandbox.paths() {
        for (coding, coded) in [
            ("gzip", gzip(&plain)),
            ("deflate", zlib(&plain)),
            ("deflate", raw_deflate(&plain)),
            ("zstd", zstd(&plain)),
            ("zstd, gzip", gzip(&zstd(&plain))),
            ("identity", plain.clone()),
        ] {
            sandbox.clear();
            let answer = Call::post(&base, PATH, coded).header("content-encoding", coding).send().await;
            assert_eq!(answer.status, 200, "{base} {coding}: {:?}", answer.headers);
            assert!(answer.body().await.complete);
            let (prefill, decode) = (only(&sandbox.prefill[0]), only(&sandbox.decode[0]));
            for record in [&prefill, &decode] {
                assert_eq!(record.header("content-encoding"), None, "{coding}");
                let length = record.header("content-length").and_then(|length| length.parse().ok());
                assert_eq!(length, Some(record.body_length), "{coding}");
            }
            assert_prefill_leg(&plain, &prefill.body);
            assert_decode_leg(&plain, &decode.body);
        }
    }
    sandbox.clear();
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_read_is_named_and_bombs_are_refused() {
    let sandbox = Sandbox::start(SandboxOptions::default().env(&[("TANDEM_MAX_BODY_BYTES", "4194304")])).await;
    let bomb = vec![b' '; 64 << 20];
    let (gzip_bomb, zstd_bomb) = (gzip(&bomb), zstd(&bomb));
    for base in sandbox.paths() {
        for (header, value, body, status, text) in [
            ("content-encoding", "br", body(), 415, "content-encoding br is not supported"),
            ("content-encoding", "gzip, compress", body(), 415, "content-encoding compress is not supported"),
            (
                "content-type",
                "application/json; charset=iso-8859-1",
                body(),
                415,
                "charset iso-8859-1 is not supported",
            ),
            ("content-encoding", "gzip", gzip_bomb.clone(), 413, "longer than 4194304 bytes when decoded"),
            ("content-encoding", "zstd", zstd_bomb.clone(), 413, "longer than 4194304 bytes when decoded"),
            ("content-encoding", "gzip", body(), 400, "not valid gzip"),
            ("content-encoding", "zstd", zstd(&body())[..60].to_vec(), 400, "not valid zstd"),
        ] {
            let answer = Call::post_bare(&base, PATH, body).header(header, value).send().await;
            assert_eq!(answer.status, status, "{base} {value}");
            let error = answer.json().await;
            let message = error["error"]["message"].as_str().unwrap_or_default();
            assert!(message.contains(text), "{message}");
        }
    }
    assert!(sandbox.engines().all(|engine| engine.records_for(PATH).is_empty()));
    // A replica that has refused bombs serves on.
    sandbox.decode[0].script(Fault::on(PATH).answer(200, "application/json", "{}"));
    let answer = Call::post(&sandbox.paths()[0], PATH, gzip(&body())).header("content-encoding", "gzip").send().await;
    assert_eq!(answer.status, 200);
    assert!(answer.body().await.complete);
    sandbox.close().await;
}
