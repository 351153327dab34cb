import { ArrowDownOutlined } from "@ant-design/icons";
import { Button } from "antd";
import { Fragment, useEffect, useLayoutEffect, useRef, useState } from "react";
import { copyText } from "../clipboard";
import { useT } from "../i18n";
import type { Conversation } from "../store/database";
import { textOf } from "../store/messages";
import { path, place, read } from "../store/tree";
import { useShortcuts } from "../shortcuts";
import { Answer } from "./Answer";
import { putBack } from "./full";
import { regenerate } from "./run";
import { UserTurn } from "./UserTurn";

const NEAR_END_PX = 60;

export function MessageList({ conversation, running }: { conversation: Conversation; running: boolean }) {
  const t = useT();
  const { id, tree } = conversation;
  const shown = path(tree);
  const last = shown.at(-1);
  const first = read(shown)[0];
  const { box, atEnd, toEnd } = useStickyEnd(shown.length);
  useShortcuts({
    copy: () => {
      const answer = shown.findLast(({ message }) => message.role === "assistant");
      if (answer) void copyText(textOf(answer.message));
    },
    regenerate: () => {
      if (last?.message.role === "assistant" && !running) regenerate(id, last.id);
    },
  });
  return (
    <div className="scroll" ref={box} tabIndex={0} role="region" aria-label={conversation.title || t("newChat")}>
      <div className="column">
        {shown.map((node) => {
          const { index, count } = place(tree, node.id);
          const common = { conversationId: id, id: node.id, index, count };
          return (
            <Fragment key={node.id}>
              {node === first && node !== shown[0] && (
                <p className="left-out">{t("leftOut")} <Button type="link" size="small" disabled={running} onClick={() => putBack(id, last!.id)}>{t("putBack")}</Button></p>
              )}
              {node.message.role === "user" ? (
                <UserTurn {...common} message={node.message} busy={running} />
              ) : (
                <Answer {...common} message={node.message} busy={running} last={node === last} />
              )}
            </Fragment>
          );
        })}
        <p className="sr-only" role="status">{running ? t("answering") : last?.message.role === "assistant" ? t("answered") : ""}</p>
      </div>
      {!atEnd && <Button className="jump" shape="circle" icon={<ArrowDownOutlined aria-hidden />} onClick={toEnd} aria-label={t("jumpDown")} />}
    </div>
  );
}

/** Keeps the end in sight while an answer grows, unless the person has scrolled up from it. */
function useStickyEnd(count: number) {
  const box = useRef<HTMLDivElement>(null);
  const sticks = useRef(true);
  const top = useRef(0);
  const [atEnd, setAtEnd] = useState(true);
  const toEnd = () => {
    sticks.current = true;
    if (!box.current) return;
    box.current.scrollTo({ top: box.current.scrollHeight });
    top.current = box.current.scrollTop;
  };
  useLayoutEffect(toEnd, [count]);
  useEffect(() => {
    const element = box.current!;
    const onScroll = () => {
      // An answer that has grown by a screen since it was followed is far from its end, too: only going up ends the following.
      const near = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_END_PX;
      if (near || element.scrollTop < top.current) sticks.current = near;
      top.current = element.scrollTop;
      setAtEnd(sticks.current);
    };
    const observer = new ResizeObserver(() => (sticks.current ? toEnd() : onScroll()));
    observer.observe(element);
    observer.observe(element.firstElementChild!);
    element.addEventListener("scroll", onScroll, { passive: true });
    return () => {
      observer.disconnect();
      element.removeEventListener("scroll", onScroll);
    };
  }, []);
  return { box, atEnd, toEnd };
}
