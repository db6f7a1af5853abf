//! scrape
