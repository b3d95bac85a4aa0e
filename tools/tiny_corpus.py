"""Text from Debian packages, the tokenizer of ds4-tiny, and the encoder used for training and evaluation."""

# ruff: noqa: RUF005, SIM115
# The script is kept as it ran when its files were made; the rules above would only reshape it.
import bz2
import glob
import json
import lzma
import os
import random
import re
import struct
import subprocess
import zlib

from tiny_tasks import DEFINE

VOCAB = 1536
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, NOTHINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
TAIL = [USER, ASSISTANT, THINK, NOTHINK, "｜DSML｜", "<｜latest_reminder｜>"]
SPECIALS = [BOS, EOS, PAD] + TAIL
SPLITS = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]

# ---------------------------------------------------------------------------
# text from Debian packages
# ---------------------------------------------------------------------------
PACKAGES = ["r-cran-janeaustenr", "r-cran-tokenizers", "golang-1.19-src", "wordnet-base"]


def r_unpack(b):
    kind = b[4:5]
    if kind == b"Z":
        if b[5:11] == b"\xfd7zXZ\x00":
            return lzma.decompress(b[5:])
        return lzma.decompress(b[5:], lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 26}])
    return bz2.decompress(b[5:]) if kind == b"2" else zlib.decompress(b[4:])


def r_texts(rdb):
    """Character vectors of an R lazy-load database, each joined by newlines."""
    data, idx = open(rdb, "rb").read(), open(rdb[:-1] + "x", "rb").read()
    idx = zlib.decompress(idx, 47)
    spans = {struct.unpack(">ii", idx[m.end() : m.end() + 8]) for m in re.finditer(rb"\0\0\0\x0d\0\0\0\x02", idx)}
    for off, size in sorted(spans):
        buf, lines, pos = r_unpack(data[off : off + size]), [], 0
        while m := re.compile(rb"\0[\0-\x0f][\0-\xff]\x09").search(buf, pos):
            n = struct.unpack(">i", buf[m.end() : m.end() + 4].rjust(4, b"\xff"))[0]
            if 0 <= n < 4000000 and m.end() + 4 + n <= len(buf):
                lines.append(buf[m.end() + 4 : m.end() + 4 + n].decode("utf-8", "replace"))
                pos = m.end() + 4 + n
            else:
                pos = m.start() + 1
        yield "\n".join(lines)


def tidy(t):
    """Join hard-wrapped lines, keep paragraphs, plain ASCII quotes."""
    for a, b in (("’", "'"), ("‘", "'"), ("“", '"'), ("”", '"'), ("--", " - "), ("—", " - "), ("_", ""), ("\r", "")):
        t = t.replace(a, b)
    paras = [re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", t)]
    return "\n".join(p for p in paras if len(p) > 2)


def fetch(out):
    debs, tree, text = (os.path.join(out, d) for d in ("debs", "tree", "text"))
    for d in (debs, tree, text):
        os.makedirs(d, exist_ok=True)
    if not glob.glob(debs + "/*.deb"):
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=debs, check=True)
    for d in glob.glob(debs + "/*.deb"):
        subprocess.run(["dpkg", "-x", d, tree], check=True)
    lib = tree + "/usr/lib/R/site-library/"
    for t in r_texts(lib + "janeaustenr/data/Rdata.rdb"):
        if len(t) > 100000:
            name = re.sub(r"\W+", "-", t[:25].split("\n")[0].lower())
            open(f"{text}/austen-{name}.txt", "w").write(tidy(t))
    for t in r_texts(lib + "tokenizers/data/Rdata.rdb"):
        if len(t) > 100000:
            end = t.find("End of Project Gutenberg")
            open(f"{text}/moby-dick.txt", "w").write(tidy(t[max(t.find("ETYMOLOGY"), 0) : end if end > 0 else None]))
    newton = open(
        tree + "/usr/share/go-1.19/src/testdata/Isaac.Newton-Opticks.txt", encoding="utf-8", errors="replace"
    ).read()
    start, end = newton.find("ADVERTISEMENT"), newton.find("*** END OF")
    open(f"{text}/opticks.txt", "w").write(tidy(newton[max(start, 0) : end if end > 0 else None]))
    glosses, defs = [], {}
    for kind in ("noun", "verb", "adj"):
        for line in open(f"{tree}/usr/share/wordnet/data.{kind}", encoding="utf-8"):
            if line[:2] == "  " or "|" not in line:
                continue
            head, gloss = line.split("|", 1)
            f = head.split()
            words = [f[4 + 2 * k].replace("_", " ") for k in range(int(f[3], 16))]
            gloss = gloss.strip()
            short = gloss.split(";")[0].strip()
            if kind == "noun" and words[0] in DEFINE and 15 < len(short) < 90 and words[0] not in defs:
                defs[words[0]] = re.sub(r"^\(.*?\)\s*", "", short)
            if '"' in gloss and len(gloss) < 160 and words[0].isalpha():
                glosses.append(f"{words[0]}: {gloss}")
    random.Random(1).shuffle(glosses)
    open(f"{text}/wordnet.txt", "w").write("\n".join(glosses[:9000]))
    json.dump(defs, open(f"{out}/defs.json", "w"), indent=0)
    for f in sorted(glob.glob(text + "/*.txt")):
        print(os.path.getsize(f), f)
    print(len(defs), "definitions")


# ---------------------------------------------------------------------------
# tokenizer
# ---------------------------------------------------------------------------
def build_tokenizer(model, digits=False):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

    tok = Tokenizer(model)
    steps = [pre_tokenizers.Split(Regex(s), "isolated") for s in SPLITS]
    if digits:  # only while learning merges: never merge two digits
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    return tok, [AddedToken(s, normalized=False, special=True) for s in SPECIALS]


def tokenizer_file(d):
    """The tokenizer learnt into folder d, or else the one that ds4-tiny was trained with, beside this script."""
    own = os.path.join(d, "tokenizer.json")
    return (
        own
        if os.path.exists(own)
        else os.path.join(os.path.dirname(os.path.abspath(__file__)), "ds4-tiny.tokenizer.json")
    )


class Encoder:
    """Pieces -> ids. Special tokens are single pieces; text never yields special ids."""

    def __init__(self, path):
        from tokenizers import Tokenizer

        self.tok = Tokenizer.from_file(path)
        self.tok.encode_special_tokens = True
        self.ids = {s: self.tok.token_to_id(s) for s in SPECIALS}

    def text(self, s):
        return self.tok.encode(s, add_special_tokens=False).ids

    def pieces(self, pieces):
        ids, wts = [], []
        enc = iter(self.tok.encode_batch([p for p, _ in pieces if p not in self.ids], add_special_tokens=False))
        for p, w in pieces:
            e = [self.ids[p]] if p in self.ids else next(enc).ids
            ids += e
            wts += [w] * len(e)
        return ids, wts


class World:
    """Texts and definitions read once."""

    def __init__(self, d):
        self.texts = {
            os.path.basename(f)[:-4]: open(f, encoding="utf-8").read() for f in sorted(glob.glob(d + "/text/*.txt"))
        }
        p = os.path.join(d, "defs.json")
        self.defs = json.load(open(p)) if os.path.exists(p) else {}
        self.sentences = []
        for name in self.texts:
            if name.startswith("austen"):
                for p in self.texts[name].split("\n"):
                    self.sentences += [s.strip() for s in re.findall(r"[A-Z][^.!?\"]{25,140}\.", p)]
