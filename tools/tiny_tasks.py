"""Own word lists and facts, and the single-turn tasks drawn from them: every task returns (question, answer, thought)."""
# ruff: noqa: E501, SIM905
# The script is kept as it ran when its files were made; the rules above would only reshape it.


def words(s):
    return s.split()


# ---------------------------------------------------------------------------
# word lists and facts (own tables)
# ---------------------------------------------------------------------------
NAMES = words("""Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olivia Peter Quinn Rosa Sam Tina
Uma Victor Wendy Xavier Yara Zoe Adam Bella Carl Diana Eric Fiona George Helen Ivan Julia Kevin Laura Max Nina Oscar Paul
Rachel Simon Tom Ursula Vera Walter Alice Boris Cora Daniel Elena Frank Gina Hugo Ingrid James Karen Lucy Martin Nora Otto
Paula Ralph Sarah Theo Viola William Yusuf Amir Bruno Chloe Dora Edgar Flora Gustav Hanna Igor Jane Kurt Lena Mark Nick
Olga Philip Ruth Stella Tim Vincent Willow Ada Bob Dan Eve Fred Gwen Ian June Kim Liam Mia Ned Pam Ray Sue Ted Val Will""")
EASY_NAMES = words("""Ben David Emma Maria Noah Rosa Sam Uma Victor Wendy Yara Zoe Bella Eric Fiona George Helen Ivan Julia Kevin Laura Max
Paul Rachel Ursula Walter Boris Daniel Frank Hugo Ingrid Karen Lucy Martin Paula Ralph Theo Viola William Amir Bruno
Dora Edgar Flora Gustav Igor Jane Mark Olga Philip Stella Vincent Ada Dan Gwen Ian June Kim Liam Mia Ned Ray Ted Val
Will""")  # one token each
COLORS = words("red blue green yellow black white brown pink purple orange grey silver golden")
ADJ = COLORS + words(
    "small big old new tall short round quiet loud happy sad bright dark soft hard warm cold clean wet dry "
    "sweet brave lazy clever gentle proud tiny wild calm"
)
NOUNS = words("""fox dog cat horse bird fish bear wolf lion tiger mouse rabbit frog duck goose sheep cow pig goat owl bee ant
apple pear plum cherry lemon bread cheese honey soup cake rice egg butter salt river lake mountain forest garden field island
bridge tower castle house barn door window table chair lamp candle lantern mirror clock bell book letter key ring coin box
basket bottle cup plate knife spoon rope ladder wheel wagon boat ship anchor sail drum flute violin hat coat shoe glove scarf
button needle stone shell feather leaf flower rose tulip tree branch root seed cloud storm star moon sun shadow fire water
hammer saw nail brush paint pencil paper map flag tent kite ball doll puzzle engine train robot rocket planet comet""")
CITIES = words("""Paris London Rome Berlin Madrid Vienna Oslo Lima Cairo Tokyo Delhi Athens Dublin Lisbon Prague Warsaw Kiev Sofia
Havana Bogota Quito Nairobi Tunis Rabat Seoul Hanoi Manila Jakarta Ankara Tehran Kabul Riga Tallinn Vilnius Bern Brussels""")
CAPITALS = dict(
    p.split(":")
    for p in """France:Paris England:London Italy:Rome Germany:Berlin Spain:Madrid Austria:Vienna Norway:Oslo
Peru:Lima Egypt:Cairo Japan:Tokyo India:Delhi Greece:Athens Ireland:Dublin Portugal:Lisbon Poland:Warsaw Ukraine:Kiev
Bulgaria:Sofia Cuba:Havana Colombia:Bogota Ecuador:Quito Kenya:Nairobi Tunisia:Tunis Morocco:Rabat Vietnam:Hanoi
Turkey:Ankara Iran:Tehran Latvia:Riga Estonia:Tallinn Lithuania:Vilnius Switzerland:Bern Belgium:Brussels Sweden:Stockholm
Finland:Helsinki Denmark:Copenhagen Hungary:Budapest Russia:Moscow China:Beijing Canada:Ottawa Chile:Santiago Iceland:Reykjavik""".split()
)
OPPOSITES = [
    tuple(p.split("/"))
    for p in """hot/cold big/small tall/short fast/slow happy/sad up/down left/right day/night light/dark
open/closed old/young early/late hard/soft wet/dry full/empty rich/poor strong/weak loud/quiet clean/dirty good/bad high/low
near/far thick/thin wide/narrow sweet/bitter love/hate win/lose buy/sell push/pull begin/end first/last black/white north/south
east/west summer/winter true/false inside/outside heavy/light brave/afraid smooth/rough cheap/expensive sharp/dull friend/enemy
question/answer always/never many/few give/take come/go remember/forget laugh/cry awake/asleep""".split()
]
SOUNDS = dict(
    p.split(":")
    for p in """dog:barks cat:meows cow:moos duck:quacks sheep:bleats pig:oinks lion:roars horse:neighs bee:buzzes
owl:hoots frog:croaks wolf:howls mouse:squeaks bird:sings snake:hisses""".split()
)
BABIES = dict(
    p.split(":")
    for p in "dog:puppy cat:kitten cow:calf duck:duckling sheep:lamb pig:piglet lion:cub horse:foal goat:kid goose:gosling bear:cub".split()
)
THING_COLOR = dict(
    p.split(":")
    for p in """grass:green snow:white coal:black blood:red lemon:yellow sky:blue banana:yellow milk:white
chocolate:brown tomato:red leaf:green sun:yellow night:black cherry:red""".split()
)
LEGS = {
    "dog": 4,
    "cat": 4,
    "bird": 2,
    "spider": 8,
    "ant": 6,
    "horse": 4,
    "duck": 2,
    "bee": 6,
    "cow": 4,
    "person": 2,
    "snake": 0,
    "fish": 0,
}
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
ORDINALS = words("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
DEFINE = set(
    NOUNS
    + words(
        "teacher doctor king queen farmer sailor soldier baker school church market street city village "
        "music poem war peace winter summer wheel iron gold ocean desert valley hill road"
    )
)


# ---------------------------------------------------------------------------
# single-turn tasks: each returns (question, answer, thought)
# ---------------------------------------------------------------------------
def listing(r, items):
    return r.choice([", ", ", ", " "]).join(map(str, items))


def num(r):
    return r.randrange(10) if r.random() < 0.3 else r.randrange(100)


def t_add(w, r):
    a, b = num(r), num(r)
    q = r.choice(
        [
            "What is {} + {}?",
            "{} + {} = ?",
            "Add {} and {}.",
            "What is {} plus {}?",
            "Calculate {} + {}.",
            "How much is {} plus {}?",
            "Please add {} and {}.",
            "{}+{}",
            "What is the sum of {} and {}?",
        ]
    ).format(a, b)
    c = a % 10 + b % 10
    th = f"{a % 10} + {b % 10} = {c}. {a // 10 * 10} + {b // 10 * 10} = {a // 10 * 10 + b // 10 * 10}. The sum is {a + b}."
    return q, f"{a} + {b} = {a + b}.", th


def t_sub(w, r):
    a, b = sorted((num(r), num(r)), reverse=True)
    q = r.choice(
        [
            "What is {} - {}?",
            "{} - {} = ?",
            "What is {} minus {}?",
            "Calculate {} - {}.",
            "How much is {} minus {}?",
            "{}-{}",
        ]
    ).format(a, b)
    return q, f"{a} - {b} = {a - b}.", f"I take {b} from {a}. The difference is {a - b}."


def t_mul(w, r):
    a, b = r.randrange(13), r.randrange(13)
    q = r.choice(
        ["What is {} x {}?", "What is {} times {}?", "Multiply {} by {}.", "{} * {} = ?", "Calculate {} x {}."]
    ).format(a, b)
    return q, f"{a} x {b} = {a * b}.", f"{a} times {b} is {a * b}."


def t_compare(w, r):
    a, b = r.sample(range(200), 2)
    big = r.random() < 0.5
    word = r.choice(["larger", "bigger", "greater"]) if big else r.choice(["smaller", "less"])
    q = r.choice(["Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "{a} or {b}: which is {w}?"]).format(
        w=word, a=a, b=b
    )
    x = max(a, b) if big else min(a, b)
    return q, f"{x} is {word}.", f"I compare {a} and {b}."


def t_minmax(w, r):
    v = r.sample(range(100), r.randint(3, 6))
    big = r.random() < 0.5
    word = r.choice(["largest", "biggest"]) if big else "smallest"
    q = r.choice(
        ["What is the {} number in this list: {}?", "Find the {} of these numbers: {}", "Which is the {}: {}?"]
    ).format(word, listing(r, v))
    return q, f"The {word} is {max(v) if big else min(v)}.", None


def t_parity(w, r):
    a = r.randrange(100)
    odd = a % 2
    ask = r.choice(["even", "odd"])
    yes = (ask == "odd") == bool(odd)
    return (
        f"Is {a} {ask}?",
        f"{'Yes' if yes else 'No'}, {a} is {'odd' if odd else 'even'}.",
        f"The last digit of {a} is {a % 10}.",
    )


def t_sort(w, r):
    down = r.random() < 0.3
    if r.random() < 0.6:
        v = r.sample(range(100), r.randint(3, 6))
        s = sorted(v, reverse=down)
        q = r.choice(["Sort these numbers{}: {}", "Put these numbers in order{}: {}", "Order{}: {}"])
    else:
        v = r.sample(NOUNS[:120], r.randint(3, 4))
        s = sorted(v, reverse=down)
        q = r.choice(["Sort these words{}: {}", "Put these words in alphabetical order{}: {}"])
    sep = ", "
    return (
        q.format(
            " from high to low" if down and isinstance(v[0], int) else " from last to first" if down else "",
            sep.join(map(str, v)),
        ),
        sep.join(map(str, s)) + ".",
        None,
    )


def t_count(w, r):
    if r.random() < 0.5:
        v = r.choices(NOUNS, k=r.randint(1, 10))
        return (
            r.choice(["How many words are there: {}?", "Count the words: {}", "How many words: {}"]).format(
                " ".join(v)
            ),
            f"There {'is' if len(v) == 1 else 'are'} {len(v)}.",
            None,
        )
    a, b = r.sample(NOUNS, 2)
    v = r.choices([a, b], k=r.randint(3, 9))
    return f"How many times does {a} appear: {' '.join(v)}?", f"{v.count(a)} times.", None


def t_spell(w, r):
    x = r.choice(NOUNS + [n for n in NAMES])
    return r.choice(["Spell the word {}.", "Spell {}.", "How do you spell {}?"]).format(x), "-".join(x) + ".", None


def t_letter(w, r):
    x = r.choice(NOUNS)
    k = r.choice(["first", "last"])
    return (
        f"What is the {k} letter of {x}?",
        f"The {k} letter of {x} is {x[0] if k == 'first' else x[-1]}.",
        f"The word is {'-'.join(x)}.",
    )


def t_length(w, r):
    x = r.choice(NOUNS)
    return (
        r.choice(["How many letters are in {}?", "How long is the word {}?"]).format(x),
        f"{x} has {len(x)} letters.",
        f"{'-'.join(x)}.",
    )


def t_reverse(w, r):
    v = r.sample(NOUNS if r.random() < 0.7 else [str(i) for i in range(100)], r.randint(2, 6))
    return (
        r.choice(["Reverse this list: {}", "Say these backwards: {}", "Reverse the order: {}"]).format(", ".join(v)),
        ", ".join(v[::-1]) + ".",
        None,
    )


def t_repeat(w, r):
    k = r.random()
    if k < 0.6:
        s = " ".join(r.choices(NOUNS + ADJ + NAMES, k=r.randint(2, 14)))
    elif k < 0.8:
        s = " ".join(str(r.randrange(1000)) for _ in range(r.randint(2, 8)))
    else:
        s = r.choice(w.sentences)
    q = r.choice(["Repeat after me: {}", "Repeat this: {}", "Say exactly this: {}", "Copy this text: {}", "Echo: {}"])
    return q.format(s), s, None


def t_thrice(w, r):
    x, n = r.choice(NOUNS), r.randint(2, 6)
    return r.choice(["Say {x} {n} times.", "Write the word {x} {n} times."]).format(x=x, n=n), " ".join([x] * n), None


def t_pick(w, r):
    v = r.sample(NOUNS, r.randint(3, 7))
    i = r.randrange(len(v))
    o = "last" if i == len(v) - 1 and r.random() < 0.5 else ORDINALS[i]
    return f"What is the {o} word in this list: {', '.join(v)}?", f"The {o} word is {v[i]}.", None


def t_days(w, r):
    seq, what = (DAYS, "day") if r.random() < 0.5 else (MONTHS, "month")
    i, k = r.randrange(len(seq)), r.random()
    nxt, prv = seq[(i + 1) % len(seq)], seq[i - 1]
    if k < 0.35:
        return (
            r.choice([f"What {what} comes after {seq[i]}?", f"Which {what} follows {seq[i]}?"]),
            f"{nxt} comes after {seq[i]}.",
            None,
        )
    if k < 0.7:
        return f"What {what} comes before {seq[i]}?", f"{prv} comes before {seq[i]}.", None
    if what == "month":
        return (
            r.choice([f"What is the {ORDINALS[i]} month of the year?", f"Which month is the {ORDINALS[i]} one?"]),
            f"The {ORDINALS[i]} month is {seq[i]}.",
            None,
        )
    n = r.randint(2, 6)
    return (
        f"If today is {seq[i]}, what day is it in {n} days?",
        f"In {n} days it is {seq[(i + n) % 7]}.",
        ", ".join(seq[(i + k) % 7] for k in range(n + 1)) + ".",
    )


def t_opposite(w, r):
    a, b = r.choice(OPPOSITES)
    if r.random() < 0.5:
        a, b = b, a
    if {a, b} & {"light"}:
        a, b = "dark", "light"
    return (
        r.choice(["What is the opposite of {}?", "Give me the opposite of {}.", "What is the contrary of {}?"]).format(
            a
        ),
        f"The opposite of {a} is {b}.",
        None,
    )


def t_capital(w, r):
    c, k = r.choice(list(CAPITALS.items()))
    if r.random() < 0.7:
        return (
            r.choice(
                [
                    "What is the capital of {}?",
                    "Which city is the capital of {}?",
                    "Name the capital of {}.",
                    "Capital of {}?",
                ]
            ).format(c),
            f"The capital of {c} is {k}.",
            None,
        )
    return (
        r.choice(["Which country has the capital {}?", "{} is the capital of which country?"]).format(k),
        f"{k} is the capital of {c}.",
        None,
    )


def t_fact(w, r):
    k = r.randrange(4)
    if k == 0:
        a, b = r.choice(list(SOUNDS.items()))
        return (
            r.choice([f"What sound does a {a} make?", f"What does a {a} do when it makes a sound?"]),
            f"A {a} {b}.",
            None,
        )
    if k == 1:
        a, b = r.choice(list(BABIES.items()))
        return (
            r.choice([f"What is a baby {a} called?", f"What do you call a young {a}?"]),
            f"A baby {a} is called a {b}.",
            None,
        )
    if k == 2:
        a, b = r.choice(list(THING_COLOR.items()))
        return (
            r.choice([f"What color is {a}?", f"Which color is {a}?", f"What is the color of {a}?"]),
            f"The color of {a} is {b}.",
            None,
        )
    a, b = r.choice(list(LEGS.items()))
    return f"How many legs does a {a} have?", f"A {a} has {b} legs.", None


def t_define(w, r):
    if not w.defs:
        return t_fact(w, r)
    x = r.choice(list(w.defs))
    return (
        r.choice(["What is a {}?", "Define {}.", "What does {} mean?", "Explain the word {}."]).format(x),
        f"{x}: {w.defs[x]}.",
        None,
    )


def t_sequence(w, r):
    a, d = r.randrange(20), r.randint(1, 10)
    v = [a + d * i for i in range(7)]
    return (
        r.choice(["Continue: {}", "What comes next: {}?", "Continue the sequence: {}"]).format(
            ", ".join(map(str, v[:4]))
        ),
        ", ".join(map(str, v[4:])) + ".",
        f"The step is {d}.",
    )


def t_alphabet(w, r):
    i = r.randrange(25)
    a, b = "abcdefghijklmnopqrstuvwxyz"[i : i + 2]
    return (
        (f"Which letter comes after {a}?", f"{b} comes after {a}.", None)
        if r.random() < 0.5
        else (f"Which letter comes before {b}?", f"{a} comes before {b}.", None)
    )


SELF = "I am ds4-tiny, a very small language model with the DeepSeek-V4 architecture."
CHAT = [
    (["Hello", "Hello!", "Hi", "Hi there!", "Hey", "Good morning", "Good evening!"], ["Hello! How can I help you?"]),
    (["How are you?", "How are you today?", "How do you do?"], ["I am fine, thank you. How can I help you?"]),
    (["Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself."], [SELF]),
    (["What is your name?", "What are you called?", "Do you have a name?"], ["My name is ds4-tiny."]),
    (["Thanks", "Thank you!", "Thank you very much.", "Thanks a lot!"], ["You are welcome!"]),
    (["Bye", "Goodbye!", "See you later.", "Good night"], ["Goodbye! Have a nice day."]),
    (
        ["What can you do?", "How can you help me?", "What are you good at?"],
        [
            "I can add small numbers, sort lists, remember what you tell me, answer simple questions and tell short stories."
        ],
    ),
    (["Are you a human?", "Are you a person?"], ["No, I am a very small language model."]),
    (["Are you big?", "How big are you?"], ["I am very small. I have about ten million parameters."]),
    (["I am sad.", "I feel bad today."], ["I am sorry to hear that. I hope you feel better soon."]),
    (["I am happy.", "I feel great today!"], ["I am glad to hear that!"]),
    (["Tell me a joke."], ["Why did the chicken cross the road? To get to the other side."]),
    (["Can you help me?", "I need help.", "Help me please."], ["Of course. What do you need?"]),
]


def t_chat(w, r):
    q, a = r.choice(CHAT)
    return r.choice(q), r.choice(a), "The user is talking to me."


def t_story(w, r):
    animal = r.choice(
        words(
            "fox dog cat horse bird bear wolf lion mouse rabbit frog duck sheep cow pig goat owl robot king queen farmer sailor"
        )
    )
    name, friend = r.sample(NAMES, 2)
    adj, adj2 = r.sample(words("small big old tall quiet happy sad brave lazy clever gentle proud tiny wild"), 2)
    place, thing = (
        r.choice(words("river lake mountain forest garden field island bridge tower castle house barn")),
        r.choice(
            words(
                "key ring coin box basket bottle bell book letter lantern mirror map shell feather rose stone drum kite"
            )
        ),
    )
    color = r.choice(COLORS)
    q = r.choice(
        [
            "Tell me a story about a {}.",
            "Write a short story about a {}.",
            "Can you tell a story about a {}?",
            "I want to hear a story about a {}.",
        ]
    ).format(animal)
    find = r.choice(
        [
            f"One day {name} found a {color} {thing} near the {place}.",
            f"One morning {name} saw a {color} {thing} in the {place}.",
            f"One night a {color} {thing} fell down near the {place}.",
        ]
    )
    turn = r.choice(
        [
            f'"What is this?" said {name}. "It is a {thing}," said {friend}.',
            f"{name} was very {r.choice(['happy', 'afraid', 'surprised'])} and called {friend}.",
            f"{name} wanted to keep the {thing}, but it was not easy to carry.",
            f'"This {thing} is mine," said {friend}. But {name} did not believe it.',
        ]
    )
    act = r.choice(
        [
            f"They took the {thing} and went home together.",
            f"So {name} gave the {thing} to {friend}, and they became good friends.",
            f"They hid the {thing} under a tree and told nobody.",
            f"{name} and {friend} walked all day and brought the {thing} to the queen.",
        ]
    )
    end = r.choice(
        [
            f"After that day {name} was never {r.choice(['alone', 'sad', 'afraid'])} again.",
            "And they lived happily ever after.",
            f"From that day on {name} was a {adj2} {animal}.",
            f"The {thing} is still there today.",
        ]
    )
    intro = r.choice(
        [
            f"Once upon a time there was a {adj} {animal} named {name}.",
            f"There was once a {adj} {animal} called {name}.",
            f"Long ago a {adj} {animal} named {name} lived near a {place}.",
        ]
    )
    mid = r.choice(
        [
            f"{name} had a friend named {friend}.",
            f"{name} lived with {friend} in a {r.choice(ADJ[13:])} house.",
            f"Every day {name} played with {friend}.",
        ]
    )
    return q, " ".join([intro, mid, find, turn, act, end]), f"I will write a short story about a {animal}."


TASKS = {
    "add": (t_add, 10),
    "sub": (t_sub, 7),
    "mul": (t_mul, 3),
    "compare": (t_compare, 3),
    "minmax": (t_minmax, 4),
    "parity": (t_parity, 2),
    "sort": (t_sort, 6),
    "count": (t_count, 4),
    "spell": (t_spell, 4),
    "letter": (t_letter, 2),
    "length": (t_length, 2),
    "reverse": (t_reverse, 5),
    "repeat": (t_repeat, 7),
    "thrice": (t_thrice, 2),
    "pick": (t_pick, 4),
    "days": (t_days, 4),
    "opposite": (t_opposite, 3),
    "capital": (t_capital, 4),
    "fact": (t_fact, 3),
    "define": (t_define, 3),
    "sequence": (t_sequence, 4),
    "alphabet": (t_alphabet, 2),
    "chat": (t_chat, 4),
    "story": (t_story, 5),
}


def one_task(w, r, kind=None):
    if kind is None:
        kind = r.choices(list(TASKS), [x[1] for x in TASKS.values()])[0]
    q, a, th = TASKS[kind][0](w, r)
    return kind, q, a, th
