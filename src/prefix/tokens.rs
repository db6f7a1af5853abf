//! Tokenizers for the index and for prompt-length buckets.
//!
//! Both are local: nothing here asks another service, so nothing here can hang. The byte-based `character` tokenizer
//! does not depend on a vocabulary at all.

use std::borrow::Cow;

use bpe_openai::cl100k_base;

use crate::knobs::Tokenizer;

/// The longest token of cl100k_base, in bytes (a run of 128 spaces; a test looks at the whole vocabulary). A text of
/// `n` bytes has therefore at least `n / 128` tokens.
const LONGEST_TOKEN: usize = 128;

/// How much of a text is turned into token ids for the index. Encoding costs about 40 ns per byte, so this bounds the
/// time on the request path to some ten milliseconds; the bytes beyond it enter the blocks as they are.
const MAX_ENCODED_BYTES: usize = 256 * 1024;

/// The bytes that are cut into blocks. `character`: the bytes themselves. `tiktoken`: the cl100k_base id of each
/// token in four bytes, big endian, for the first 256 KiB, then the remaining bytes themselves; a text that is not
/// UTF-8 counts as `character`.
pub fn tokenize(tokenizer: Tokenizer, text: &[u8]) -> Cow<'_, [u8]> {
    match tokenizer {
        Tokenizer::Character => Cow::Borrowed(text),
        Tokenizer::Tiktoken => match std::str::from_utf8(text) {
            Ok(text) => Cow::Owned(encode(text)),
            Err(_) => Cow::Borrowed(text),
        },
    }
}

fn encode(text: &str) -> Vec<u8> {
    let (head, tail) = text.split_at(text.floor_char_boundary(MAX_ENCODED_BYTES));
    let ids = cl100k_base().encode(head);
    let mut bytes = Vec::with_capacity(ids.len() * 4 + tail.len());
    for id in ids {
        bytes.extend_from_slice(&id.to_be_bytes());
    }
    bytes.extend_from_slice(tail.as_bytes());
    bytes
}

/// Exact number of cl100k_base tokens of `text` when it is at most `limit`, else `None`. The cost is bounded by
/// `limit`, not by the length of the text.
pub fn count_tokens_up_to(text: &str, limit: usize) -> Option<usize> {
    if text.is_empty() {
        return Some(0);
    }
    // Exact, and it spares a hostile text the scan: more bytes than `limit` of the longest tokens could cover.
    if text.len() > limit.saturating_mul(LONGEST_TOKEN) {
        return None;
    }
    let tokenizer = cl100k_base();
    tokenizer.count_till_limit(&tokenizer.normalize(text), limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXTS: &[&str] = &[
        "",
        "a",
        "hello world",
        "  leading and trailing  ",
        "Grüße aus Köln, 你好，世界 🦀🦀",
        "fn main() { println!(\"{}\", 1 + 2); }\n\n\n",
        "1234567890 3.14159 0xdeadbeef",
        "<|endoftext|> is text here",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "\t \r\n \u{a0}\u{3000}",
    ];

    #[test]
    fn no_token_is_longer_than_the_constant() {
        let bpe = &cl100k_base().bpe;
        let longest = (0..bpe.num_tokens() as u32).map(|id| bpe.token_len(id)).max();
        assert_eq!(longest, Some(LONGEST_TOKEN));
    }

    #[test]
    fn known_counts() {
        // From the published tiktoken examples.
        assert_eq!(count_tokens_up_to("hello world", 10), Some(2));
        assert_eq!(count_tokens_up_to("tiktoken is great!", 10), Some(6));
        assert_eq!(cl100k_base().encode("hello world"), [15339, 1917]);
    }

    #[test]
    fn exact_up_to_the_limit_and_none_beyond() {
        for text in TEXTS {
            let exact = cl100k_base().count(*text);
            for limit in [0, 1, exact.saturating_sub(1), exact, exact + 1, 10_000, usize::MAX] {
                let expected = (exact <= limit).then_some(exact);
                assert_eq!(count_tokens_up_to(text, limit), expected, "{text:?} up to {limit}");
            }
        }
    }

    #[test]
    fn the_shortcut_is_exact_at_its_boundary() {
        let spaces = " ".repeat(LONGEST_TOKEN * 3);
        let exact = cl100k_base().count(spaces.as_str());
        assert_eq!(count_tokens_up_to(&spaces, exact), Some(exact));
        assert_eq!(count_tokens_up_to(&spaces, 2), None);
        assert_eq!(count_tokens_up_to(&"x".repeat(8 << 20), 100), None);
    }

    #[test]
    fn character_is_the_bytes_themselves() {
        let text = "Grüße".as_bytes();
        assert!(matches!(tokenize(Tokenizer::Character, text), Cow::Borrowed(b) if b == text));
    }

    #[test]
    fn tiktoken_is_four_bytes_per_id_big_endian() {
        let bytes = tokenize(Tokenizer::Tiktoken, b"hello world");
        assert_eq!(&*bytes, [15339u32.to_be_bytes(), 1917u32.to_be_bytes()].concat());
    }

    #[test]
    fn r76_what_is_not_utf8_falls_back_to_bytes() {
        let broken = [b'a', 0xff, b'b'];
        assert_eq!(&*tokenize(Tokenizer::Tiktoken, &broken), broken);
    }

    #[test]
    fn the_end_of_a_very_long_text_still_counts() {
        let long = "é".repeat(MAX_ENCODED_BYTES);
        let (one, other) = (format!("{long}x"), format!("{long}y"));
        let (one, other) =
            (tokenize(Tokenizer::Tiktoken, one.as_bytes()), tokenize(Tokenizer::Tiktoken, other.as_bytes()));
        assert_ne!(one, other);
        assert_eq!(one.len(), other.len());
        assert_eq!(one.last(), Some(&b'x'));
    }
}
