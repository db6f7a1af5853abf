//! Bodies with a content coding.

use std::io::Write;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::super::{Coding, DecodeError, UnreadableForm, decode};

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
}

fn gzip(body: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body).unwrap();
    encoder.finish().unwrap()
}

fn zlib(body: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body).unwrap();
    encoder.finish().unwrap()
}

fn raw_deflate(body: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body).unwrap();
    encoder.finish().unwrap()
}

fn zstd(body: &[u8]) -> Vec<u8> {
    compress_to_vec(body, CompressionLevel::Fastest)
}

fn decoded(codings: &[Coding], body: Vec<u8>, limit: usize) -> Result<Bytes, DecodeError> {
    decode(codings, &body.into(), limit, &mut |_| true)
}

#[test]
fn headers_name_what_has_to_be_undone() {
    use Coding::{Deflate, Gzip, Zstd};
    for (values, expected) in [
        (&[][..], &[][..]),
        (&["identity"], &[]),
        (&[""], &[]),
        (&["gzip"], &[Gzip]),
        (&["GZip"], &[Gzip]),
        (&["x-gzip"], &[Gzip]),
        (&["deflate"], &[Deflate]),
        (&["zstd"], &[Zstd]),
        (&["gzip, identity ,zstd"], &[Zstd, Gzip]),
        (&["gzip", "zstd"], &[Zstd, Gzip]),
    ] {
        let mut map = HeaderMap::new();
        for value in values {
            map.append("content-encoding", HeaderValue::from_static(value));
        }
        assert_eq!(Coding::read(&map).as_deref(), Ok(expected), "{values:?}");
    }
    for (value, text) in [
        ("br", "content-encoding br is not supported; gzip, deflate, zstd, identity are"),
        ("gzip, compress", "content-encoding compress is not supported; gzip, deflate, zstd, identity are"),
        ("a\"<b>", "content-encoding ab is not supported; gzip, deflate, zstd, identity are"),
        ("gzip,gzip,gzip,gzip", "a request body may have 3 content codings at most"),
    ] {
        assert_eq!(Coding::read(&headers(&[("content-encoding", value)])).unwrap_err().to_string(), text);
    }
}

#[test]
fn charsets_other_than_utf_8_are_not_read() {
    for good in [
        "application/json",
        "application/json; charset=utf-8",
        "application/json;charset=\"UTF-8\"",
        "application/json; Charset=us-ascii",
        "multipart/form-data; boundary=charset; charset=utf8",
        "application/json; charset",
    ] {
        assert_eq!(Coding::read(&headers(&[("content-type", good)])), Ok(vec![]), "{good}");
    }
    for (bad, name) in [
        ("application/json; charset=iso-8859-1", "iso-8859-1"),
        ("application/json; charset=utf-16", "utf-16"),
        ("application/json; profile=x; charset=\"windows-1252\"", "windows-1252"),
    ] {
        assert_eq!(
            Coding::read(&headers(&[("content-type", bad)])),
            Err(UnreadableForm::Charset(name.into())),
            "{bad}"
        );
    }
}

#[test]
fn what_was_coded_comes_back() {
    use Coding::{Deflate, Gzip, Zstd};
    let body = r#"{"model":"m","prompt":"hello"}"#.repeat(9000).into_bytes();
    for (codings, coded) in [
        (&[Gzip][..], gzip(&body)),
        (&[Deflate], zlib(&body)),
        (&[Deflate], raw_deflate(&body)),
        (&[Zstd], zstd(&body)),
        (&[Gzip, Zstd], gzip(&zstd(&body))),
        // Several members, and frames, one after the other; zstd may have frames that are skipped.
        (&[Gzip], [gzip(&body[..7]), gzip(&[]), gzip(&body[7..])].concat()),
        (&[Zstd], [zstd(&body[..7]), b"\x50\x2a\x4d\x18\x03\0\0\0xyz".to_vec(), zstd(&body[7..])].concat()),
        (&[], body.clone()),
    ] {
        assert_eq!(decoded(codings, coded, body.len()).unwrap(), body, "{codings:?}");
    }
}

#[test]
fn what_is_cut_short_or_changed_is_corrupt() {
    let body = b"{\"model\":\"m\",\"prompt\":\"hello hello hello hello\"}";
    for (coding, coded) in [
        (Coding::Gzip, gzip(body)),
        (Coding::Deflate, zlib(body)),
        (Coding::Deflate, raw_deflate(body)),
        (Coding::Zstd, zstd(body)),
    ] {
        for end in 0..coded.len() {
            let found = decoded(&[coding], coded[..end].to_vec(), 1 << 20);
            assert!(matches!(found, Err(DecodeError::Corrupt(_))), "{coding:?} cut at {end}: {found:?}");
        }
        let found = decoded(&[coding], [&coded[..], b"junk"].concat(), 1 << 20);
        assert!(matches!(found, Err(DecodeError::Corrupt(_))), "{coding:?} with more behind it: {found:?}");
    }
    let mut wrong_sum = gzip(body);
    let at = wrong_sum.len() - 8;
    wrong_sum[at] ^= 1;
    assert_eq!(decoded(&[Coding::Gzip], wrong_sum, 1 << 20), Err(DecodeError::Corrupt("gzip")));
}

#[test]
fn a_bomb_is_given_up_while_it_is_decoded() {
    let zeros = vec![0; 32 << 20];
    for (coding, bomb) in [
        (Coding::Gzip, gzip(&zeros)),
        (Coding::Deflate, zlib(&zeros)),
        (Coding::Deflate, raw_deflate(&zeros)),
        (Coding::Zstd, zstd(&zeros)),
    ] {
        assert!(bomb.len() < 64 << 10, "{}", bomb.len());
        let mut taken = 0;
        let mut count = |bytes: usize| {
            taken += bytes;
            true
        };
        let found = decode(&[coding], &bomb.clone().into(), 1 << 20, &mut count);
        assert_eq!(found, Err(DecodeError::TooLong(1 << 20)));
        assert!(taken <= 1 << 20, "{coding:?}: {taken}");
        // The limit is inclusive, and room is asked for before it is taken.
        assert_eq!(decoded(&[coding], bomb.clone(), 32 << 20).unwrap().len(), 32 << 20);
        assert_eq!(decode(&[coding], &bomb.into(), 32 << 20, &mut |_| false), Err(DecodeError::NoRoom));
    }
    // Nothing comes of them, but each is work.
    let empty = gzip(&[]).repeat(2000);
    assert_eq!(decoded(&[Coding::Gzip], empty, 1 << 20), Err(DecodeError::Corrupt("gzip")));
    // A window of 16 MiB (RFC 9659 allows 8).
    let wide = b"\x28\xb5\x2f\xfd\x00\x70\x01\0\0".to_vec();
    assert_eq!(decoded(&[Coding::Zstd], wide, 1 << 20), Err(DecodeError::Corrupt("zstd")));
    let widest = b"\x28\xb5\x2f\xfd\x00\x68\x01\0\0".to_vec();
    assert_eq!(decoded(&[Coding::Zstd], widest, 1 << 20), Ok(Bytes::new()));
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        for coding in [Coding::Gzip, Coding::Deflate, Coding::Zstd] {
            let _ = decoded(&[coding], bytes.clone(), 1 << 16);
            let mut changed = match coding {
                Coding::Gzip => gzip(&bytes),
                Coding::Deflate => zlib(&bytes),
                Coding::Zstd => zstd(&bytes),
            };
            let at = bytes.len() % changed.len();
            changed[at] ^= bytes.first().copied().unwrap_or(1);
            let _ = decoded(&[coding], changed, 1 << 16);
        }
    }
}
