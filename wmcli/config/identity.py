"""The settings that identify a job, in the spelling of this version and of every earlier one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from wmcli.config.migrations import EARLIER, earlier_identities, earlier_names
from wmcli.config.sections import Section
from wmcli.config.tables import flat, unflat


class Identity:
    """Values that the result of a job depends on.

    They leave out settings at their defaults, so that a new key changes no identity. The `earlier` values recognize
    artifacts of earlier versions.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        earlier: Iterable[Mapping[str, Any]] | None = None,
        sections: Iterable[str] = (),
    ) -> None:
        self.values = dict(values)
        self.earlier = [dict(values) for _ in EARLIER] if earlier is None else [dict(each) for each in earlier]
        """Values by which earlier versions identified the job, the latest version first."""
        self.sections = tuple(sections)
        """Names of the sections that the result depends on."""

    @classmethod
    def of_sections(cls, values: Mapping[str, Any], changed: Mapping[str, Any], sections: Iterable[str]) -> Identity:
        """Build the identity of some sections.

        Args:
            values: Complete values, and the `alternatives`.
            changed: Values that are not at their defaults.
            sections: Names of the sections.
        """
        now = {key: value for key, value in changed.items() if value != {}}
        return cls(now, earlier_identities(values, changed), sections)

    @classmethod
    def of_acting(cls, values: Mapping[str, Any], changed: Mapping[str, Any], keys: Collection[str]) -> Identity:
        """Build the identity of acting.

        Args:
            values: Complete values of the sections `dynamics` and `controller`.
            changed: Values that are not at their defaults.
            keys: Keys, `section.key`, that acting depends on.
        """

        def part(identity: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
            return unflat({key: value for key, value in flat(identity).items() if key in names})

        names = zip(*(earlier_names(key) for key in keys), strict=True) if keys else [()] * len(EARLIER)
        spelled = zip(earlier_identities(values, changed), names, strict=True)
        *earlier, first = [part(identity, of_schema) for identity, of_schema in spelled]
        # Schema 1 named the settings of a search "search", and had those of dynamics without a section.
        first = {"search": first["controller"]} if "controller" in first else first.get("dynamics", {})
        sections = dict.fromkeys(key.partition(".")[0] for key in keys)
        return cls({"acting": part(changed, keys)}, [*({"acting": each} for each in earlier), first], sections)

    @classmethod
    def of_part(cls, name: str, part: Section, *, without: Collection[str] = ()) -> Identity:
        """Build the identity of a named group of settings, without some of its keys."""
        now = {key: value for key, value in part.changed().items() if key not in without}
        complete = {key: value for key, value in part.plain().items() if key not in without}
        return cls({name: now}, [{name: now}] * (len(EARLIER) - 1) + [{name: complete}])

    def __or__(self, more: Mapping[str, Any] | Identity) -> Identity:
        other = more if isinstance(more, Identity) else Identity(more)
        pairs = zip(self.earlier, other.earlier, strict=True)
        sections = dict.fromkeys((*self.sections, *other.sections))
        return Identity(self.values | other.values, [mine | theirs for mine, theirs in pairs], sections)

    def instead_of(self, *former: Identity) -> Identity:
        """Return this identity, which recognizes the artifacts of `former` ones as well.

        They are those by which earlier versions identified the job although its result does not depend on all of their
        values. The identity that is returned takes no more values.
        """
        recognized = [values for each in former for values in (each.values, *each.earlier)]
        return Identity(self.values, [*self.earlier, *recognized], self.sections)

    def revised(self, revision: int) -> Identity:
        """Return the identity under a revision of the stage, see `wmcli.artifacts.job.REVISIONS`.

        Revision 1 includes all earlier versions of wm.
        """
        return self if revision == 1 else Identity(self.values | {"revision": revision}, [], self.sections)
