"""The registry against plugins of every kind. Each test sees only the plugins it adds (path=[...])."""

from __future__ import annotations

import re
import warnings

import pytest

from ds4.backend.registry import BackendEntry, Registry
from ds4.errors import BackendError, BackendUnavailableError, PluginError, PluginWarning, SettingError
from tests.support.fake_plugins import BAD, PluginFolder, backend_code

ABSENT = "return Probe(False, 'no driver found')"


def load(plugins: PluginFolder, *, only: list[str] | None = None, strict: bool = False) -> Registry:
    """Load, with every warning an error: nothing is left out without the test expecting it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Registry.load(only, strict, path=[str(plugins.path)])


def load_with_warnings(plugins: PluginFolder) -> tuple[Registry, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        registry = Registry.load(path=[str(plugins.path)])
    assert all(w.category is PluginWarning for w in seen)
    return registry, [str(w.message) for w in seen]


def refusal(plugins: PluginFolder, code: str) -> str:
    """The reason for which a plugin of distribution `mine` is left out; a good neighbour must stay usable."""
    plugins.add("mine", code, version="2.5")
    plugins.add("zz-good", backend_code("good"))
    registry, messages = load_with_warnings(plugins)
    bad, good = registry.entries()
    assert messages == [f"plugin mine of mine 2.5 is left out: {bad.reason}"]
    assert bad == BackendEntry("mine", "mine", "2.5", None, bad.reason)
    assert bad.reason is not None and "\n" not in bad.reason
    assert good.backend is not None and registry.choose() is good.backend
    return bad.reason


# ---------------------------------------------------------------- good plugins


def test_nothing_installed(plugins: PluginFolder) -> None:
    registry = load(plugins)
    assert registry.entries() == ()
    with pytest.raises(BackendUnavailableError, match="pip install -e"):
        registry.choose()
    with pytest.raises(BackendError, match="pip install -e"):
        registry.get("cpu")


def test_entry_names_its_distribution(plugins: PluginFolder) -> None:
    plugins.add("Some.Plugin", backend_code("gpu"), version="3.1")
    (entry,) = load(plugins).entries()
    assert (entry.name, entry.distribution, entry.version, entry.reason) == ("gpu", "Some.Plugin", "3.1", None)
    assert entry.backend is not None and entry.backend.name == "gpu"


def test_listing_imports_only_what_is_picked(plugins: PluginFolder) -> None:
    plugins.add("one", backend_code("one"))
    plugins.add("two", "raise RuntimeError('imported')\n")
    registry = load(plugins, only=["one"])
    assert [(e.name, e.reason) for e in registry.entries()] == [("one", None), ("two", "left out by only=one")]


def test_an_object_can_carry_the_hooks(plugins: PluginFolder) -> None:
    code = backend_code("obj", hook="")
    code += "class Hooks:\n    @hookimpl\n    def ds4_register_backends(self, register):\n        register(Fake)\n"
    plugins.add("obj", code + "hooks = Hooks()\n", value="obj_plugin:hooks")
    assert load(plugins).get("obj").name == "obj"


def test_one_plugin_several_backends(plugins: PluginFolder) -> None:
    hook = "class Other(Fake):\n    name = 'other'\n"
    hook += "@hookimpl\ndef ds4_register_backends(register):\n    register(Fake)\n    register(Other)\n"
    plugins.add("many", backend_code("fake", hook=hook))
    assert [entry.name for entry in load(plugins).entries()] == ["fake", "other"]


def test_source_folder_does_not_repeat_an_installed_distribution(plugins: PluginFolder) -> None:
    plugins.add("mine", backend_code("mine"))
    info = plugins.path / "second" / "mine.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: Mine\nVersion: 0.9\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[ds4.backends]\nmine = mine_plugin\n", encoding="utf-8")
    registry = Registry.load(path=[str(plugins.path), str(plugins.path / "second")])
    assert [(entry.name, entry.version) for entry in registry.entries()] == [("mine", "1.0")]


# ---------------------------------------------------------------- bad plugins


@pytest.mark.parametrize("name", BAD)
def test_field_case_plugin_is_refused(plugins: PluginFolder, name: str) -> None:
    code, said = BAD[name]
    plugins.add("ds4", backend_code("cpu"), point="cpu")
    plugins.add(name, code)
    registry, messages = load_with_warnings(plugins)
    assert len(messages) == 1 and f"{name} 1.0" in messages[0] and said in messages[0]
    assert [entry.name for entry in registry.entries() if entry.backend is not None] == ["cpu"]
    with pytest.raises(PluginError, match=re.escape(said)) as caught:
        load(plugins, strict=True)
    assert caught.value.data["distribution"] == name


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("class Stop(BaseException): pass\nraise Stop()\n", "importing mine_plugin raised Stop"),
        ("def broken(:\n", "raised SyntaxError"),
        ("x = 1\n", "it has no hook ds4_register_backends"),
        (
            backend_code(hook="def ds4_register_backend(register):\n    register(Fake)\n"),
            "it has ds4_register_backend but no hook: put @ds4.plugin.hookimpl above",
        ),
        (
            backend_code(hook="@hookimpl\ndef ds4_register_backend(register):\n    register(Fake)\n"),
            "unknown hook ds4_register_backend; did you mean ds4_register_backends?",
        ),
        (
            backend_code(hook="@hookimpl\ndef ds4_register_backends(register):\n    raise OSError('a\\nb')\n"),
            "its hook ds4_register_backends raised OSError: a b",
        ),
        (
            backend_code(hook="@hookimpl\ndef ds4_register_backends(register):\n    return Fake\n"),
            "registered nothing; call register(...) instead",
        ),
        (
            backend_code(hook="@hookimpl\ndef ds4_register_backends(register):\n    pass\n"),
            "its hook ds4_register_backends registered no backend",
        ),
        (
            backend_code(hook="@hookimpl\ndef ds4_register_backends(register):\n    register(Fake())\n"),
            "which is not a subclass of ds4.plugin.Backend",
        ),
        (backend_code().replace("def open", "def opened"), "Fake does not implement open"),
        (backend_code("Bad Name"), "has the name 'Bad Name'"),
        (backend_code("auto"), "has the name 'auto'"),
        (backend_code().replace("name = 'fake'", ""), "has the name None"),
        (backend_code().replace("priority = 0", "priority = 'high'"), "has the priority 'high'"),
        (backend_code() + "    register(Fake)\n", "backend name 'fake' is already that of distribution mine"),
        (
            backend_code() + "Fake.__init__ = lambda self: 1 / 0\n",
            "creating Fake raised ZeroDivisionError: division by zero",
        ),
        (
            backend_code().replace("api_version = 1", "api_version = None"),
            "Fake does not say for which version of the plugin API it was written",
        ),
        (
            backend_code().replace("api_version = 1", ""),
            "Fake does not say for which version of the plugin API it was written",
        ),
        (backend_code().replace("api_version = 1", "api_version = '1'"), "'1', which is not a whole number"),
    ],
)
def test_bad_plugin_is_left_out_with_a_sentence(plugins: PluginFolder, code: str, said: str) -> None:
    assert said in refusal(plugins, code)


def test_nothing_is_half_registered(plugins: PluginFolder) -> None:
    hook = "class Broken(Fake):\n    name = 'broken'\n    api_version = 2\n"
    hook += "@hookimpl\ndef ds4_register_backends(register):\n    register(Fake)\n    register(Broken)\n"
    assert "Broken was written for version 2" in refusal(plugins, backend_code("fake", hook=hook))


def test_unreadable_entry_points_are_one_bad_plugin(plugins: PluginFolder) -> None:
    plugins.add_info("mine", "[ds4.backends]\nno equals sign\n")
    plugins.add("zz-good", backend_code("good"))
    registry, messages = load_with_warnings(plugins)
    assert len(messages) == 1 and "mine 1.0" in messages[0] and "entry_points.txt cannot be read" in messages[0]
    assert registry.choose().name == "good"


def test_ctrl_c_is_not_a_broken_plugin(plugins: PluginFolder) -> None:
    plugins.add("mine", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load(plugins)


def test_strict_switch_from_the_environment(plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("mine", "raise RuntimeError('broken')\n")
    monkeypatch.setenv("DS4_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match="RuntimeError: broken") as caught:
        Registry.load(path=[str(plugins.path)])
    assert isinstance(caught.value.__cause__, RuntimeError)
    monkeypatch.setenv("DS4_STRICT_PLUGINS", "maybe")
    with pytest.raises(SettingError, match="DS4_STRICT_PLUGINS"):
        Registry.load(path=[str(plugins.path)])


# ---------------------------------------------------------------- names


def test_first_distribution_by_name_wins_a_name(plugins: PluginFolder) -> None:
    plugins.add("b-plugin", backend_code("same"))
    plugins.add("a-plugin", backend_code("same"))
    registry, messages = load_with_warnings(plugins)
    assert [(e.distribution, e.backend is not None) for e in registry.entries()] == [
        ("a-plugin", True),
        ("b-plugin", False),
    ]
    assert len(messages) == 1 and "b-plugin" in messages[0] and "distribution a-plugin" in messages[0]


def test_own_name_stays_ours_even_when_not_loaded(plugins: PluginFolder) -> None:
    plugins.add("ds4", backend_code("cpu"), point="cpu")
    plugins.add("aaa", backend_code("cpu"))
    with pytest.raises(PluginWarning, match="'cpu' is already that of distribution ds4"):
        load(plugins, only=["aaa"])


def test_plugins_switch_picks_and_refuses(plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("ds4", backend_code("cpu"), point="cpu")
    plugins.add("gpu", backend_code("gpu"))
    monkeypatch.setenv("DS4_PLUGINS", "gpu")
    registry = Registry.load(path=[str(plugins.path)])
    assert [(e.name, e.reason) for e in registry.entries()] == [("cpu", "left out by DS4_PLUGINS=gpu"), ("gpu", None)]
    with pytest.raises(BackendError, match=re.escape("cpu of ds4 (left out by DS4_PLUGINS=gpu)")):
        registry.get("cpu")
    monkeypatch.setenv("DS4_PLUGINS", "cpu,cuda")
    with pytest.raises(SettingError, match="'cuda'; installed: cpu, gpu"):
        Registry.load(path=[str(plugins.path)])
    with pytest.raises(BackendError, match="'metal'; installed: cpu, gpu"):
        load(plugins, only=["metal"])


def test_unknown_name_lists_names_reasons_and_the_nearest(plugins: PluginFolder) -> None:
    plugins.add("ds4", backend_code("cpu"), point="cpu")
    plugins.add("mine", "import no_such_driver\n")
    registry, _ = load_with_warnings(plugins)
    with pytest.raises(BackendError) as caught:
        registry.get("cpuu")
    text = str(caught.value)
    assert "'cpuu' (did you mean cpu?); known: cpu, mine of mine (importing mine_plugin raised" in text
    assert caught.value.data == {"backend": "cpuu"}


# ---------------------------------------------------------------- choosing


def test_auto_takes_the_highest_available_and_says_what_it_passed_over(plugins: PluginFolder) -> None:
    plugins.add("ds4", backend_code("cpu", priority=10), point="cpu")
    plugins.add("far", backend_code("far", priority=90, probe=ABSENT))
    plugins.add("low", backend_code("low", priority=1, probe=ABSENT))
    registry = load(plugins)
    assert registry.choose("auto").name == "cpu"
    assert registry.note == "using backend cpu; not available: far (no driver found)"
    assert registry.choose("cpu").name == "cpu"
    assert registry.note is None


def test_auto_without_anything_better_says_nothing(plugins: PluginFolder) -> None:
    plugins.add("low", backend_code("low", priority=1))
    plugins.add("top", backend_code("top", priority=2))
    registry = load(plugins)
    assert registry.choose().name == "top" and registry.note is None


def test_equal_priorities_ours_first_then_by_distribution(plugins: PluginFolder) -> None:
    plugins.add("aaa", backend_code("aaa"))
    assert load(plugins).choose().name == "aaa"
    plugins.add("ds4", backend_code("cpu"), point="cpu")
    assert load(plugins).choose().name == "cpu"


def test_negative_priority_is_never_chosen_by_itself(plugins: PluginFolder) -> None:
    plugins.add("null", backend_code("null", priority=-1))
    registry = load(plugins)
    assert registry.choose("null").name == "null"
    with pytest.raises(BackendUnavailableError, match="none is chosen by itself; known: null"):
        registry.choose()


def test_absent_backend_by_name_is_refused_with_its_reason(plugins: PluginFolder) -> None:
    plugins.add("gpu", backend_code("gpu", probe=ABSENT))
    registry = load(plugins)
    assert registry.get("gpu").name == "gpu"
    with pytest.raises(BackendUnavailableError, match="backend gpu is not available: no driver found") as caught:
        registry.choose("gpu")
    assert caught.value.data == {"backend": "gpu", "reason": "no driver found"}
    with pytest.raises(BackendUnavailableError, match=re.escape("no backend is available: gpu (no driver found)")):
        registry.choose()


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("raise SystemExit(3)", "its probe raised SystemExit: 3"),
        ("return None", "its probe returned NoneType, not a ds4.plugin.Probe"),
        ("return Probe(False)", "its probe gave no reason"),
    ],
)
def test_failing_probe_is_an_absent_device(plugins: PluginFolder, probe: str, reason: str) -> None:
    plugins.add("gpu", backend_code("gpu", probe=probe, priority=5))
    plugins.add("other", backend_code("other"))
    registry = load(plugins)
    found = registry.probe(registry.get("gpu"))
    assert (found.available, found.reason) == (False, reason)
    assert registry.choose().name == "other" and registry.note is not None and reason in registry.note


def test_ctrl_c_during_a_probe_reaches_the_user(plugins: PluginFolder) -> None:
    plugins.add("gpu", backend_code("gpu", probe="raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        load(plugins).choose()
