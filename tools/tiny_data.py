#!/usr/bin/env python3
"""Corpus, tokenizer and synthetic tasks for the bundled ds4-tiny model.

    python tools/tiny_data.py fetch  DIR     Debian packages -> DIR/text/*.txt (needs apt-get, dpkg)
    python tools/tiny_data.py vocab  DIR     DIR/text -> DIR/tokenizer.json (byte-level BPE, DeepSeek's specials)
    python tools/tiny_data.py show   DIR     print a few samples of every kind

Everything random is drawn from a `random.Random` handed in by the caller, so a seed fixes the data.
A training document is a list of (text or special token, weight) pieces; `encode` turns it into ids.
"""

# ruff: noqa: RUF005, RUF021, RUF059
# The script is kept as it ran when its files were made; the rules above would only reshape it.
import json
import os
import random
import sys

from tiny_corpus import (
    ASSISTANT,
    BOS,
    EOS,
    NOTHINK,
    PAD,
    SPECIALS,
    TAIL,
    THINK,
    USER,
    VOCAB,
    Encoder,  # noqa: F401 - train_tiny and export_tiny take it from here
    World,
    build_tokenizer,
    fetch,
    tokenizer_file,  # noqa: F401 - likewise
)
from tiny_tasks import ADJ, CITIES, COLORS, EASY_NAMES, NAMES, NOUNS, TASKS, one_task, words


def train_vocab(d, size=VOCAB):
    from tokenizers import models, pre_tokenizers, trainers

    rng = random.Random(7)
    world = World(d)
    lines = []
    for name, text in world.texts.items():
        paras = text.split("\n")
        lines += paras if name.startswith(("austen-emma", "austen-pride")) else rng.sample(paras, len(paras) // 6)
    for _ in range(6000):
        lines.append("".join(p for p, _ in dialog(world, rng, 300) if p not in SPECIALS))
    for _ in range(300):
        lines.append("".join(p for p, _ in recall(world, rng, 1500) if p not in SPECIALS))
    raw, _ = build_tokenizer(models.BPE(), digits=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tr = trainers.BpeTrainer(vocab_size=size - len(SPECIALS), initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(lines, tr)
    st = json.loads(raw.to_str())["model"]
    order = [BOS, EOS, PAD] + sorted(st["vocab"], key=st["vocab"].get) + TAIL
    assert len(order) == size and len(set(order)) == size
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in st["merges"]]
    tok, added = build_tokenizer(models.BPE(vocab={t: i for i, t in enumerate(order)}, merges=merges))
    tok.add_special_tokens(added)
    assert tok.get_vocab_size() == size and tok.token_to_id(BOS) == 0 and tok.token_to_id(EOS) == 1
    tok.save(os.path.join(d, "tokenizer.json"))
    n = sum(len(e.ids) for e in tok.encode_batch(lines[:3000]))
    print("vocab", size, "chars per token", sum(map(len, lines[:3000])) / n)


# ---------------------------------------------------------------------------
# recall: facts with keys, asked later in the same words
# ---------------------------------------------------------------------------
def value(r, kind):
    if kind == "number":
        return str(r.randrange(10, 1000))
    if kind == "code":
        return str(r.randrange(1000, 10000))
    if kind == "word":
        return r.choice(NOUNS)
    if kind == "pair":
        return f"{r.choice(ADJ)} {r.choice(NOUNS)}"
    return r.choice(CITIES)


def keys(r, n, easy=False):
    """n distinct keys of one style; `easy`: single words only."""
    style = r.random() * (0.75 if easy else 1)
    names = EASY_NAMES if easy and n <= len(EASY_NAMES) else NAMES
    if style < 0.5 and n <= len(names):
        return r.sample(names, n)
    if style < 0.75 and n <= len(NOUNS):
        return r.sample(NOUNS, n)
    if style < 0.92:
        out = [f"{a} {b}" for a in ADJ for b in NOUNS]
    elif style < 0.96:
        head = r.choice(["box", "room", "item", "page"])
        out = [f"{head} {i}" for i in range(1, max(2 * n, 100))]
    else:
        out = [f"{a} {b[0]}." for a in NAMES for b in CITIES]
        out = list(dict.fromkeys(out))
    return r.sample(out, n)


# Keys stand behind a space in statement and answer, so that a one-token key is the same token in both.
FACTS = [  # statement, question, answer
    ("The {what} of {k} is {v}.", "What is the {what} of {k}?", "The {what} of {k} is {v}."),
    ("The {what} for {k} is {v}.", "Tell me the {what} for {k}.", "The {what} for {k} is {v}."),
    ("Note that {k} has the {what} {v}.", "Which {what} does {k} have?", "I know that {k} has the {what} {v}."),
    ("Remember that {k} likes {v}.", "What does {k} like?", "I remember that {k} likes {v}."),
    ("My friend {k} lives in {v}.", "Where does {k} live?", "Your friend {k} lives in {v}."),
    ("In the box of {k} there is the {v}.", "What is in the box of {k}?", "In the box of {k} there is the {v}."),
]
WHAT = {
    "number": ["number", "score", "age", "price"],
    "code": ["code", "pin", "number"],
    "word": ["word", "password", "secret word", "symbol"],
    "pair": ["password", "sign", "prize"],
    "city": ["city", "town"],
}


class Memo:
    """A set of facts, how each is written, and how each is asked."""

    def __init__(self, w, r, n, easy=False):
        self.r = r
        self.kind = r.choices(list(WHAT), [2, 1, 5, 0.5, 1.5] if easy else [3, 2, 3, 2, 1.5])[0]
        self.keys = (
            r.sample(EASY_NAMES, n)
            if easy and self.kind in ("word", "pair") and n <= len(EASY_NAMES)
            else keys(r, n, easy)
        )
        self.vals = [value(r, self.kind) for _ in self.keys]
        self.what = r.choice(WHAT[self.kind])
        if r.random() < 0.55:
            self.sep = r.choice([": ", ": ", " = ", " - "])
            self.bullet = r.choice(["- ", "* "]) if r.random() < 0.9 else ""
            self.fact = None
        else:
            ok = [
                f
                for f in FACTS
                if "{what}" in f[0]
                or (self.kind == "city") == ("lives" in f[0])
                and self.kind in ("word", "city", "pair")
            ]
            if self.kind in ("number", "code"):
                ok = FACTS[:3]
            self.fact = r.choice(ok)

    def line(self, i):
        if self.fact:
            return self.fact[0].format(k=self.keys[i], v=self.vals[i], what=self.what)
        return f"{self.bullet}{self.keys[i]}{self.sep}{self.vals[i]}"

    def ask(self, i):
        k = self.keys[i]
        if self.fact and self.r.random() < 0.7:
            q = self.fact[1].format(k=k, what=self.what)
        else:
            q = self.r.choice(
                [
                    "What is the {w} of {k}?",
                    "Tell me the {w} of {k}.",
                    "{k}?",
                    "What does it say about {k}?",
                    "Look up {k}.",
                    "Find {k}.",
                ]
            ).format(k=k, w=self.what)
        if self.fact:
            return q, self.fact[2].format(k=k, v=self.vals[i], what=self.what)
        return q, f"It says {k}{self.sep}{self.vals[i]}."


def recall_doc(w, r, tokens, enc_len=None):
    """A note with facts (and maybe filler prose) of about `tokens` tokens -> (text, memo, fact indices in order)."""
    filler = 0 if r.random() < 0.6 else r.choice([0.3, 0.6, 0.9])
    per = 9 + (34 * filler / (1 - filler) if filler else 0)
    n = max(2, min(int(tokens / per), 1200))
    m = Memo(w, r, n)
    lines, size = [], 0
    for i in range(n):
        if filler:
            while r.random() < filler:
                s = r.choice(w.sentences)
                lines.append(s)
                size += len(s) / 3.2
        lines.append(m.line(i))
        size += len(lines[-1]) / 2.4
        if size > tokens and i >= 1:
            n = i + 1
            break
    sep = r.choice(["\n", "\n", " "]) if m.fact or filler else r.choice(["\n", "\n", ", ", "; "])
    return sep.join(lines), m, n


def answer_pieces(a, th, r, think=0.12):
    if th and r.random() < think:
        return [(ASSISTANT, 0), (THINK, 0), (th, 1), (NOTHINK, 1), (a, 1), (EOS, 1)]
    return [(ASSISTANT, 0), (NOTHINK, 0), (a, 1), (EOS, 1)]


CTX = 0.1  # loss weight of what the user says


def recall(w, r, tokens):
    """A long note, then many questions about it, up to about `tokens` tokens."""
    share = r.choice([0.5, 0.6, 0.75]) if tokens > 1000 else r.choice([0.35, 0.5, 0.65])
    text, m, n = recall_doc(w, r, int(tokens * share))
    out, size = [(BOS, 0)], len(text) / 2.4
    if r.random() < 0.1:
        out.append((r.choice(SYSTEMS), 0))
    i = r.randrange(n)
    q, a = m.ask(i)
    head = r.choice(["Read this list.", "Here are some notes.", "Remember these facts.", "Notes:", ""])
    body = f"{head}\n{text}" if head else text
    k = r.random()
    if k < 0.5:
        out += [(USER, 0), (body + r.choice(["\n", "\n\n", "\nQuestion: "]) + q, CTX)] + answer_pieces(
            a, f"I look in the note. {a}", r
        )
    elif k < 0.8:
        out += [(USER, 0), (body, CTX)] + answer_pieces(r.choice(["OK.", "I will remember that."]), None, r)
    else:
        out += [(USER, 0), (q + "\n" + body, CTX)] + answer_pieces(a, f"I look in the note. {a}", r)
    while size < tokens * 1.1:
        if r.random() < 0.06:
            _, q, a, th = one_task(w, r)
        else:
            i = r.randrange(n)
            q, a = m.ask(i)
            th = f"I look in the note. {a}"
        out += [(USER, 0), (q, CTX)] + answer_pieces(a, th, r, 0.06)
        size += (len(q) + len(a)) / 3 + 4
    return out


def drill(w, r, tokens, level):
    """Blocks of one short list with most of its facts asked, or of one text to copy; sizes grow with level 0..1."""
    out, size = [(BOS, 0)], 0
    if r.random() < 0.06:
        out.append((r.choice(SYSTEMS), 0))
    while size < tokens * 1.1:
        if r.random() < 0.2:
            n, k = r.randint(3, 6 + int(60 * level)), r.random()
            if k < 0.4:
                t = " ".join(r.choices(NOUNS + ADJ + NAMES, k=n))
            elif k < 0.6:
                t = " ".join(str(r.randrange(1000)) for _ in range(n // 2 + 1))
            elif k < 0.8:
                t = " ".join(r.choices(w.sentences, k=1 + int(3 * level * r.random())))
            else:
                m = Memo(w, r, n // 4 + 2, True)
                t = "\n".join(m.line(i) for i in range(len(m.keys)))
            q = r.choice(
                ["Repeat after me: {}", "Repeat this: {}", "Say exactly this: {}", "Copy this text: {}", "Echo: {}"]
            ).format(t)
            out += [(USER, 0), (q, CTX)] + answer_pieces(t, None, r)
            size += 2 * len(t) / 2.6
            continue
        n = r.randint(2, 4 + int(44 * level * level)) if r.random() < 0.6 else r.randint(2, 4 + int(8 * level))
        m = Memo(w, r, n, level < 0.6 or r.random() < 0.5)
        sep = r.choice(["\n", "\n", " "]) if m.fact else r.choice(["\n", "\n", ", ", "; "])
        text = sep.join(m.line(i) for i in range(n))
        head = r.choice(["Read this list.", "Here are some notes.", "Remember these facts.", "Notes:", ""])
        body = f"{head}\n{text}" if head else text
        asked = r.sample(range(n), min(n, r.randint(2, 9)))
        q, a = m.ask(asked[0])
        k = r.random()
        if k < 0.6:
            out += [(USER, 0), (body + r.choice(["\n", "\n", "\n\n", "\nQuestion: "]) + q, CTX)] + answer_pieces(
                a, f"I look in the note. {a}", r, 0.06
            )
            asked = asked[1:]
        elif k < 0.85:
            out += [(USER, 0), (body, CTX)] + answer_pieces(r.choice(["OK.", "I will remember that."]), None, r)
        else:
            out += [(USER, 0), (q + "\n" + body, CTX)] + answer_pieces(a, f"I look in the note. {a}", r, 0.06)
            asked = asked[1:]
        size += len(body) / 2.5
        for i in asked:
            q, a = m.ask(i)
            out += [(USER, 0), (q, CTX)] + answer_pieces(a, f"I look in the note. {a}", r, 0.04)
            size += (len(q) + len(a)) / 3 + 4
        if n < 20 and r.random() < 0.15:
            out += [(USER, 0), (r.choice(["Repeat the list.", "Repeat the notes."]), CTX)] + answer_pieces(
                text, None, r
            )
            size += len(text) / 2.5
    return out


SYSTEMS = [
    "You are a helpful assistant.",
    "You are ds4-tiny, a small assistant.",
    "Answer briefly.",
    "Be kind and helpful.",
]


def personal(w, r):
    """A fact the user tells about himself: (statement, reply, question, answer)."""
    k = r.randrange(6)
    if k == 0:
        x = r.choice(NAMES)
        return (
            r.choice(["My name is {}.", "I am {}.", "Hi, my name is {}.", "Call me {}."]).format(x),
            f"Nice to meet you, {x}.",
            r.choice(["What is my name?", "Do you know my name?", "Who am I?"]),
            f"Your name is {x}.",
        )
    if k == 1:
        x = r.choice(COLORS)
        return (
            f"My favorite color is {x}.",
            f"{x} is a nice color.",
            r.choice(["What is my favorite color?", "Which color do I like?"]),
            f"Your favorite color is {x}.",
        )
    if k == 2:
        x = r.choice(CITIES)
        return (
            r.choice(["I live in {}.", "My home is in {}."]).format(x),
            f"{x} is a nice city.",
            r.choice(["Where do I live?", "In which city do I live?"]),
            f"You live in {x}.",
        )
    if k == 3:
        x, y = r.choice(words("dog cat horse bird fish rabbit mouse")), r.choice(NAMES)
        return (
            f"I have a {x} named {y}.",
            f"{y} is a nice name for a {x}.",
            r.choice([f"What is the name of my {x}?", f"How is my {x} called?"]),
            f"Your {x} is named {y}.",
        )
    if k == 4:
        x = r.randrange(10, 1000)
        return (
            r.choice(["Remember the number {}.", "Please remember this number: {}."]).format(x),
            f"I will remember {x}.",
            r.choice(["Which number did I tell you?", "What was the number?", "What number should you remember?"]),
            f"The number is {x}.",
        )
    x = r.choice(NOUNS)
    return (
        r.choice(["The secret word is {}.", "Remember the word {}."]).format(x),
        f"I will remember {x}.",
        r.choice(["What is the secret word?", "Which word did I tell you?", "What was the word?"]),
        f"The word is {x}.",
    )


def dialog(w, r, tokens):
    """Several unrelated tasks in one conversation, with facts told and asked back later."""
    out, size, pending = [(BOS, 0)], 0, []
    k = r.random()
    named = 0.12 <= k < 0.18
    if k < 0.12:
        out.append((r.choice(SYSTEMS), 0))
    elif named:
        name = r.choice(NAMES)
        out.append((f"Your name is {name}.", 0))
        pending = [("What is your name?", f"My name is {name}.")]
    while size < tokens * 1.1:
        if pending and r.random() < 0.3:
            q, a = pending.pop(r.randrange(len(pending)))
            th = None
        elif r.random() < 0.12:
            s, a, pq, pa = personal(w, r)
            pending = [x for x in pending if x[1].split()[:3] != pa.split()[:3]] + [(pq, pa)]
            q, th = s, None
        else:
            kind, q, a, th = one_task(w, r)
            if named and a == "My name is ds4-tiny.":
                continue
        out += [(USER, 0), (q, CTX)] + answer_pieces(a, th, r)
        size += (len(q) + len(a)) / 3 + 4
    return out


def prose(w, r, chars):
    t = w.texts[r.choices(list(w.texts), [len(x) for x in w.texts.values()])[0]]
    i = r.randrange(max(1, len(t) - chars))
    j = t.find(". ", i) if r.random() < 0.5 else t.find("\n", i)
    j = j + (2 if t[j : j + 2] == ". " else 1) if 0 <= j - i < 1500 else i
    return [(BOS, 0), (t[j : j + chars], 1)]


def sample(w, enc, r, length, mix=(0.34, 0.33, 0.33, 0), level=1.0):
    """One training row: exactly `length` ids and loss weights. mix: prose, dialog, long-note recall, drill."""
    k = r.choices("pdrl", mix)[0]
    pieces = (
        prose(w, r, length * 5)
        if k == "p"
        else dialog(w, r, length)
        if k == "d"
        else recall(w, r, length)
        if k == "r"
        else drill(w, r, length, level)
    )
    ids, wts = enc.pieces(pieces)
    while len(ids) < length:
        more, mw = enc.pieces(dialog(w, r, length - len(ids))[1:])
        ids, wts = ids + more, wts + mw
    return ids[:length], wts[:length]


if __name__ == "__main__":
    cmd, d = sys.argv[1:3]
    if cmd == "fetch":
        fetch(d)
    elif cmd == "vocab":
        train_vocab(d)
    else:
        w, r = World(d), random.Random(3)
        for k in TASKS:
            for _ in range(2):
                print(one_task(w, r, k))
        for f, n in ((dialog, 150), (recall, 250), (recall, 250), (recall, 250)):
            print("----")
            print("".join(p for p, _ in f(w, r, n)))
